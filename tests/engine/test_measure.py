"""Rounds that are measured are those that were asked for."""

from pathlib import Path

import pytest

from engine import ConfigError, measure
from engine.kernels.linear import Linear
from engine.kernels.tile_linear import Tiles
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


def test_an_activation_within_a_product_does_not_raise_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an MLP's gate and up are timed with it, and torch's products without it beside them."""
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    engine = make_engine(target, max_num_seqs=2, max_model_len=96)
    assert len(measure._floors(engine, 2, 1)) == 1
    gated: list[Linear] = []

    def tiles(_self: Linear, rows: int, *, gated: bool = False) -> Tiles | None:
        return Tiles(64, 64, 0, 64, 3, 4) if rows == 2 and gated else None

    monkeypatch.setattr(Linear, "tiles", tiles)
    monkeypatch.setattr(Linear, "gated", lambda self, _x: gated.append(self))
    products = measure._round_products(engine, 2, 1)
    measure._timer(engine, lambda: None, products, "in one")()
    layers = measure._dense(engine)[0].layers
    assert [id(m) for m in gated] == [id(layer.gate_up) for layer in layers]
    asked: list[str] = []

    def timer(*given: object) -> object:
        asked.append(str(given[3]))
        return {"in one": lambda: 3.0, "torch": lambda: 2.0}[asked[-1]]

    monkeypatch.setattr(measure, "_timer", timer)
    floor = measure._Floor(measure._floors(engine, 2, 1))
    assert asked == ["in one", "torch"]
    floor.measure(0.01)
    assert (floor.least, floor.of_torch) == (2.0, 2.0)
