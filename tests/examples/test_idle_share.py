"""examples/idle_share.py: gaps between what runs, traced in the middle of a run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples import idle_share
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=12)


@given(SPANS)
def test_gaps_are_what_nothing_covers(spans: list[tuple[int, int]]) -> None:
    intervals = [(float(begin), float(begin + length)) for begin, length in spans]
    span, gaps = idle_share.idle_of(intervals)
    covered = {at for begin, length in spans for at in range(begin, begin + length)}
    first, last = (f(x for pair in intervals for x in pair) for f in (min, max))
    assert span == last - first
    assert sum(gaps) == span - len(covered)
    assert all(gap > 0 for gap in gaps)


@pytest.mark.parametrize("mode", ["all", "plain"])
def test_what_runs_in_the_middle_is_traced(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        write_target(tmp_path / "t", "Qwen3ForCausalLM"),
        write_draft(tmp_path / "d", markov="rnn"),
        max_num_seqs=2,
    )
    running: list[tuple[str, int]] = []

    class Trace:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> None:
            running.append(("begin", engine.stats.output_tokens))

        def __exit__(self, *_: object) -> None:
            running.append(("end", engine.stats.output_tokens))

        def events(self) -> list[Any]:
            device = torch.autograd.DeviceType
            time = Some(start=1.0, end=2.5)
            return [Some(device_type=d, time_range=time) for d in (device.CUDA, device.CPU)]

    monkeypatch.setattr(torch.profiler, "profile", Trace)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    many = idle_share.make_requests(8)
    vocabulary = engine.vocab_size
    short = [
        replace(
            r,
            prompt_token_ids=tuple(t % vocabulary for t in r.prompt_token_ids[:9]),
            params=replace(r.params, max_tokens=12 + i),
        )
        for i, r in enumerate(many)
    ]
    monkeypatch.setattr(idle_share, "make_requests", lambda count: short[:count])
    assert idle_share.traced(engine, 2, mode) == [(1.0, 2.5)]
    assert [name for name, _ in running] == ["begin", "end"]
    assert 0 < running[0][1] < running[1][1]
    assert not engine.running
