"""CUDA graphs of rounds: one for the draft and one for verification, per tier of requests.

A graph replays fixed addresses: rows, caches, and one index buffer that says which rows are in the
round. A batch is padded with the spare row up to its tier. Graphs are captured when a tier is first
needed, after a run with padding only, so that nothing is compiled or allocated while capturing.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from engine.kernels.acceptance import Drafts
from engine.runner.batch import Members
from engine.runner.steps import Steps

T = TypeVar("T")


def graph_tiers(most: int) -> list[int]:
    """Batch sizes to capture, up to `most` requests: steps of 1/8 of the size, at least 1.

    Padding then wastes at most an eighth of a round, and there are about 8 tiers an octave.
    """
    tiers, size = [], 1
    while size < most:
        tiers.append(size)
        size += max(1, 1 << max(size.bit_length() - 4, 0))
    return [*tiers, most]


class Kind(NamedTuple):
    """What a captured round has to be able to do."""

    tier: int
    speculating: bool
    sampled: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class Captured:
    """One kind of round."""

    draft: torch.cuda.CUDAGraph | None
    verify: torch.cuda.CUDAGraph
    confidence: torch.Tensor | None  # [R, G] float32
    result: torch.Tensor  # [R, 1+W] int64


class Graphs:
    """Captured rounds by kind."""

    def __init__(self, steps: Steps, max_num_seqs: int, pool_bytes: int = 0) -> None:
        """Prepare; nothing is captured yet.

        Args:
            steps: The device side.
            max_num_seqs: N, the largest batch.
            pool_bytes: What the rounds' shared memory is known to come to.
        """
        self._pool_bytes = pool_bytes
        self._steps = steps
        self._tiers = graph_tiers(max_num_seqs)
        self._index = torch.full(
            (self._tiers[-1],), steps.rows.spare, dtype=torch.int64, device=steps.rows.device
        )
        self._captured: dict[Kind, Captured] = {}
        self._pool: Any = None

    def kind(self, num_reqs: int, speculating: bool, sampled: bool, filtered: bool) -> Kind:
        """The kind of round to use for `num_reqs` requests.

        A captured tier up to twice the batch is preferred to capturing a closer one: at the end of
        a run the batch shrinks through every tier, and each would be used a few times only.
        """
        fit = self._tiers[bisect_left(self._tiers, num_reqs)]
        for tier in self._tiers[self._tiers.index(fit) :]:
            kind = Kind(tier, speculating, sampled, filtered)
            if tier > 2 * num_reqs:
                break
            if kind in self._captured:
                return kind
        return Kind(fit, speculating, sampled, filtered)

    def __contains__(self, kind: Kind) -> bool:
        """Is this kind of round captured?"""
        return kind in self._captured

    def load(self, rows: Items[int], tier: int) -> None:
        """Say which rows are in the next round."""
        padded = [*rows, *[self._steps.rows.spare] * (tier - len(rows))]
        self._index[:tier].copy_(torch.tensor(padded).pin_memory(), non_blocking=True)

    def get(self, kind: Kind) -> Captured:
        """The round of this kind, captured if need be; the index buffer is left as padding then."""
        found = self._captured.get(kind)
        if found is None:
            found = self._captured[kind] = self._capture(kind)
        return found

    def clear(self) -> None:
        """Forget all captured rounds, and let go of their memory."""
        self._captured.clear()
        self._pool, self._pool_bytes = None, 0

    def _capture(self, kind: Kind) -> Captured:
        steps = self._steps
        self.load([], kind.tier)
        members = Members(self._index[: kind.tier], ())
        flags = {"sampled": kind.sampled, "filtered": kind.filtered}

        def draft() -> Drafts | None:
            return steps.draft(members, sampled=kind.sampled) if kind.speculating else None

        # compile and fill caches outside the capture; padding writes the spare row only
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                steps.verify(members, draft(), **flags)
        torch.cuda.current_stream().wait_stream(side)
        first, drafts = self._record(draft) if kind.speculating else (None, None)
        second, result = self._record(lambda: steps.verify(members, drafts, **flags))
        confidence = steps.last_confidence if kind.speculating else None
        return Captured(first, second, confidence, result)

    def _record(self, body: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                if self._pool is None and self._pool_bytes:
                    # taken whole, and given back to the pool at once: tiers captured one after the
                    # other would each add what the last one left too small
                    torch.empty(self._pool_bytes, dtype=torch.uint8, device=self._index.device)
                out = body()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own behind
        # one pool: rounds never run at the same time, so their scratch may be the same
        self._pool = self._pool or graph.pool()
        return graph, out
