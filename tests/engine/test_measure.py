"""Rounds that are measured are those that were asked for."""

from pathlib import Path

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
