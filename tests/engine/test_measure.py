"""Rounds that are measured are those that were asked for."""

from pathlib import Path

import pytest

from engine import ConfigError, measure
from engine.measure import measure_round
from engine.telemetry import RoundRecord
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine
from tests.helpers.host_graphs import use_host_graphs


def test_a_batch_is_not_measured_in_a_larger_ones_rounds(tmp_path: Path) -> None:
    """64 requests after 256 had 128 slots, which were captured on the way: 18.8 ms for 10.6."""
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d", markov="vanilla")
    engine = make_engine(target, draft, max_num_seqs=20, max_model_len=96, verify="all")
    use_host_graphs(engine)
    seen: list[RoundRecord] = []
    engine.follow(seen.append)
    for requests in (20, 10):
        seen.clear()
        measure_round(engine, requests, prompt_tokens=5, rounds=2, warmup=2)
        assert [(r.requests, r.slots) for r in seen[-3:]] == [(requests, requests)] * 3
    assert not engine.decisions.planner.own_tiers


def test_what_ran_before_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 rounds of 71 ms, draft and verify took 78: the last one of the warm-up was counted."""
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d", markov="vanilla")
    engine = make_engine(target, draft, max_num_seqs=2, max_model_len=96, verify="all")
    clock, ended, pending = engine.runner.clock, [1e6], list[float]()

    def synchronize(_: object) -> None:  # on a GPU a phase is counted once it is seen to have ended
        pending.extend(ended)
        ended.clear()

    def settle() -> None:
        while pending:
            clock.seconds["verify"] += pending.pop()

    monkeypatch.setattr(measure, "_synchronize", synchronize)
    monkeypatch.setattr(clock, "settle", settle)
    found = measure.measure_round(engine, 2, prompt_tokens=5, rounds=3, warmup=2)
    assert not ended
    assert found.draft + found.verify <= found.wall


def test_all_decode_although_prompts_take_many_steps(tmp_path: Path) -> None:
    """The first ones ended while the others' prompts were computed: no round had all of them."""
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    engine = make_engine(target, max_num_seqs=12, max_num_batched_tokens=4, max_model_len=96)
    found = measure.measure_round(engine, 12, speculate=False, prompt_tokens=8, rounds=2, warmup=2)
    assert found.committed == 1.0
    short = make_engine(target, max_num_seqs=12, max_num_batched_tokens=4, max_model_len=20)
    with pytest.raises(ConfigError, match="of 12 requests some end before all of them decode"):
        measure.measure_round(short, 12, speculate=False, prompt_tokens=8, rounds=2, warmup=2)
    assert not short.running
