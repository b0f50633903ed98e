"""Ranks as threads of one process: exchanges of any number of ranks without processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from engine.dist.collectives import Solo


class ThreadRanks(Solo):
    """One of several threads that exchange through a list; counts what it receives."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self.name = f"{size} threads"
        self.received: list[int] = []
        """Bytes from others, one number an exchange."""

        self._board, self._barrier = board, barrier

    def _everyones(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = x
        self._barrier.wait(timeout=20)
        found = [part.clone() for part in self._board]
        self._barrier.wait(timeout=20)
        assert {(p.shape, p.dtype) for p in found} == {(x.shape, x.dtype)}
        self.received.append((self.size - 1) * x.nbytes)
        return found

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._everyones(x))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._everyones(x)).sum(dim=0)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        assert out_splits is in_splits is None
        everyones = self._everyones(x)
        out.copy_(torch.cat([part.chunk(self.size)[self.rank] for part in everyones]))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._everyones(x)[0]


def on_threads(size: int, fn: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`fn` on every rank; what each returned, in order."""
    board, barrier = [None] * size, threading.Barrier(size)
    ranks = [ThreadRanks(rank, size, board, barrier) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(fn, ranks))
