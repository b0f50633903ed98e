"""Where results come in a round late, work on them is done while the next round runs."""

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, SamplingParams
from engine.runner.pending import Pending
from engine.text import Tokenizer
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import complete, make_engine, prompts, requests


def record(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(`launch`, n) of each round, (`take`, n) of its result, (`text`, n) of each use of it."""
    events: list[tuple[str, int]] = []
    numbers: dict[int, int] = {}
    kept: list[Pending] = []
    latest = [0]
    real_round, real_wait, real_decode = engine.runner.verify, Pending.wait, Tokenizer.decode

    def round_(*args: Any) -> Pending:
        pending = real_round(*args)
        kept.append(pending)
        numbers[id(pending)] = len(kept)
        events.append(("launch", len(kept)))
        return pending

    def wait(self: Pending) -> Any:
        latest[0] = numbers.get(id(self), latest[0])
        events.append(("take", latest[0]))
        return real_wait(self)

    def decode(self: Tokenizer, ids: Items[int]) -> str:
        events.append(("text", latest[0]))
        return real_decode(self, ids)

    engine.runner.verify = round_  # type: ignore[method-assign]
    monkeypatch.setattr(Pending, "wait", wait)
    monkeypatch.setattr(Tokenizer, "decode", decode)
    return events


def test_texts_are_made_after_the_next_round_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = write_target(tmp_path / "t", "Qwen3ForCausalLM"), write_draft(tmp_path / "d")
    engine = make_engine(target, draft, max_num_seqs=3, overlap="on")
    events = record(engine, monkeypatch)
    params = SamplingParams(max_tokens=12, stop=("never in it",))
    many: Any = requests(prompts(9), params)
    complete(engine, many)
    launches = sum(kind == "launch" for kind, _ in events)
    at = {event: i for i, event in reversed(list(enumerate(events)))}
    texts = [(n, i) for i, (kind, n) in enumerate(events) if kind == "text"]
    assert len(texts) > 50  # every token is looked at for the stop string
    for n, i in texts:
        if n < launches:
            assert at["launch", n + 1] < i, f"text of round {n} before round {n + 1} was launched"
    for n in range(1, launches):
        assert at["launch", n + 1] < at["take", n]
