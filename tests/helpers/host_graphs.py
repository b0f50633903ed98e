"""Captured rounds without a GPU: bodies run again at each replay, on a graph's fixed buffers."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from engine import Engine
from engine.kernels.acceptance import Drafts
from engine.runner.batch import Members
from engine.runner.graphs import Captured, Graphs, Kind
from engine.runner.rows import Rows


class _Present:
    """Who is in the index buffer at a replay, as the reference attention wants to know."""

    def __init__(self, rows: Rows, index: torch.Tensor) -> None:
        self._rows, self._index = rows, index

    def _live(self) -> list[int]:
        return [row for row in self._index.tolist() if row != self._rows.spare]

    def __len__(self) -> int:
        return len(self._live())

    def __iter__(self) -> Iterator[Any]:
        for row in self._live():
            yield SimpleNamespace(block_ids=self._rows.block_table[row].tolist())


class _Replay:
    """Runs a body, and copies what it gives to where the first run's result lies."""

    def __init__(self, body: Callable[[], torch.Tensor]) -> None:
        self._body = body
        self.out = body()

    def replay(self) -> None:
        self.out.copy_(self._body())


class HostGraphs(Graphs):
    """Graphs whose replays run eagerly; index buffer, padding, tiers and results are theirs."""

    captures = 0

    def load(self, rows: Any, tier: int) -> None:
        padded = [*rows, *[self._steps.rows.spare] * (tier - len(rows))]
        self._index[:tier] = torch.tensor(padded)

    def _capture(self, kind: Kind) -> Captured:
        steps, self.captures = self._steps, self.captures + 1
        self.load([], kind.tier)
        index = self._index[: kind.tier]
        members = Members(index, _Present(steps.rows, index))  # type: ignore[arg-type]
        latest: list[Drafts] = []

        def draft() -> torch.Tensor:
            latest[:] = [steps.draft(members, sampled=kind.sampled)]
            return latest[0].token_ids

        def verify() -> torch.Tensor:
            drafts = latest[0] if kind.speculating else None
            return steps.verify(members, drafts, sampled=kind.sampled, filtered=kind.filtered)

        first: Any = _Replay(draft) if kind.speculating else None
        second: Any = _Replay(verify)
        return Captured(first, second, steps.last_confidence, second.out)


def use_host_graphs(engine: Engine) -> HostGraphs:
    """Let a CPU engine replay."""
    graphs = HostGraphs(engine.runner.steps, engine.runner.rows.spare)
    engine.runner.graphs = graphs
    return graphs
