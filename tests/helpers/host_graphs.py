"""Captured rounds without a GPU: bodies run again at each replay, on a graph's fixed buffers."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from engine import Engine
from engine.kernels.acceptance import Drafts
from engine.runner.graphs import Graphs
from engine.runner.rows import Rows
from engine.spec.tiers import Tiers


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

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = body
        self.out = body()

    def replay(self) -> None:
        new = self._body()
        for old, value in zip(_tensors(self.out), _tensors(new), strict=True):
            old.copy_(value)


def _tensors(x: torch.Tensor | Drafts | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, tuple):
        return list(x)
    return [t for t in (x.token_ids, x.logits, x.survival) if t is not None]


class HostGraphs(Graphs):
    """Graphs whose replays run eagerly; input buffer, padding, tiers and results are theirs."""

    def present(self, index: torch.Tensor) -> Any:
        return _Present(self._steps.rows, index)

    def record(self, body: Callable[[], Any]) -> tuple[Any, Any]:
        replay = _Replay(body)
        return replay, replay.out


def use_host_graphs(engine: Engine) -> HostGraphs:
    """Let a CPU engine replay; call it before the engine's first run."""
    graphs = HostGraphs(engine.runner.steps, engine.runner.rows.spare)
    engine.runner.graphs = graphs
    engine.decisions.planner.set_tiers(Tiers(engine.runner.rows.spare, engine.gamma))
    return graphs
