"""CUDA graphs of rounds: the draft by slots for requests, verification by verify tokens as well.

A graph replays fixed addresses: rows, caches, and one buffer that holds the verify budget and says
which rows are in the round and what KV blocks they have got. A batch is padded with the spare row
up to its tier. Graphs are captured when first needed, after a run with padding only, so that
nothing is compiled or allocated while capturing. Prefills have theirs in prefills.py.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Set
from collections.abc import Sequence as Items
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch

from engine.kernels.acceptance import Drafts
from engine.kernels.capture import capture
from engine.runner.batch import Members, Needs
from engine.runner.prefills import Prefills
from engine.runner.steps import Steps
from engine.sequence import Sequence
from engine.spec.plan import Path, Plan

T = TypeVar("T")

_NUMBERS = 2
"""Before the rows: the budget, and how many new blocks there are."""

_TELLING = 3
"""Captures whose median says what one takes: the first ones compile."""


@dataclass(frozen=True, slots=True)
class DraftGraph:
    """A captured draft pass, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    drafts: Drafts
    confidence: torch.Tensor | None  # [R, G] float32


@dataclass(frozen=True, slots=True)
class VerifyGraph:
    """A captured verification, and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # [R, 2 + W (+ G)] int64


class Graphs:
    """Captured rounds."""

    def __init__(self, steps: Steps, max_num_seqs: int, pool_bytes: int = 0) -> None:
        """Prepare; nothing is captured yet.

        Args:
            steps: The device side.
            max_num_seqs: N, the largest batch.
            pool_bytes: What the rounds' shared memory is known to come to.
        """
        self._pool_bytes = pool_bytes
        self._steps = steps
        spare, device = steps.rows.spare, steps.rows.device
        self.most_blocks = 2 * max_num_seqs
        """New blocks that a round may bring along: a request seldom gets more than one."""

        size = _NUMBERS + max_num_seqs + 3 * self.most_blocks
        self._inputs = torch.full((size,), spare, dtype=torch.int64, device=device)
        self._drafts: dict[tuple[int, bool, int], DraftGraph] = {}
        self._verifies: dict[Needs, dict[tuple[Path, int, int], VerifyGraph]] = {}
        self._pool: Any = None
        self._loaded: list[int] = []
        self._took: deque[float] = deque(maxlen=8)
        """Milliseconds of the latest captures."""

        self.capture_ms: float | None = None
        """What a capture takes, compilation left out; None if that is not known."""

        # no cycle: memory is to go when the last reference does
        self.prefills = Prefills(steps, weakref.proxy(self))

    @property
    def count(self) -> int:
        """Graphs captured so far."""
        rounds = len(self._drafts) + sum(map(len, self._verifies.values()))
        return rounds + self.prefills.count

    def captured(self, needs: Needs) -> Set[tuple[Path, int, int]]:
        """Rounds that can be replayed: (path, requests, tokens)."""
        return self._verifies.setdefault(needs, {}).keys()

    def clear(self) -> None:
        """Forget all captured rounds, and let go of their memory."""
        self._drafts.clear()
        self._verifies.clear()
        self.prefills.clear()
        self._pool, self._pool_bytes = None, 0

    def load(self, rows: Items[int], plan: Plan, blocks: Items[int] = ()) -> None:
        """Say which rows are in the round, how many drafts it verifies, and its new blocks.

        Args:
            rows: Of the batch.
            plan: What the round does.
            blocks: As `Rows.new_blocks`, up to `most_blocks`; the round's first graph writes them.
        """
        padding = [self._steps.rows.spare] * (plan.requests - len(rows))
        values = [plan.budget or 0, len(blocks) // 3, *rows, *padding, *blocks]
        if values == self._loaded:  # verification most often finds what its draft pass left
            return
        if values[1:] == self._loaded[1:]:  # and a round the rows of the one before
            self._inputs[:1].fill_(values[0])
        else:
            self._steps.rows.uploads.send_integers(values, self._inputs)
        self._loaded = values

    def _write_blocks(self, plan: Plan) -> None:
        """A round's new blocks, which follow its rows."""
        first = _NUMBERS + plan.requests
        entries = self._inputs[first : first + 3 * self.most_blocks]
        self._steps.rows.write_blocks(self._inputs[1:2], entries)

    def draft(self, plan: Plan, needs: Needs) -> DraftGraph:
        """The draft pass of a plan, captured if need be; that leaves padding in the buffer."""
        key = plan.requests, needs.sampled, needs.crowd
        if key not in self._drafts:
            self._drafts[key] = self._capture_draft(plan, needs)
        return self._drafts[key]

    def verify(self, plan: Plan, needs: Needs) -> VerifyGraph:
        """The verification of a plan, captured if need be; that leaves padding in the buffer."""
        graphs, key = self._verifies.setdefault(needs, {}), (plan.path, plan.requests, plan.tokens)
        if key not in graphs:
            graphs[key] = self._capture_verify(plan, needs)
        return graphs[key]

    def _capture_draft(self, plan: Plan, needs: Needs) -> DraftGraph:
        steps = self._steps
        self.load([], plan)
        members = self._members(plan, needs)

        def draft() -> Drafts:
            self._write_blocks(plan)
            return steps.draft(members, sampled=needs.sampled)

        graph, drafts = self.record(draft)
        return DraftGraph(graph, drafts, steps.last_confidence)

    def _capture_verify(self, plan: Plan, needs: Needs) -> VerifyGraph:
        steps = self._steps
        drafts = None if plan.path == "plain" else self.draft(plan, needs).drafts
        self.load([], plan)
        members, budget = self._members(plan, needs), self._inputs[:1]
        compact = plan.path == "compact"

        def verify() -> torch.Tensor:
            if drafts is None:  # else its draft pass has
                self._write_blocks(plan)
            return steps.verify(
                members,
                drafts,
                sampled=needs.sampled,
                filtered=needs.filtered,
                budget=budget if compact else None,
                num_tokens=plan.tokens if compact else None,
            )

        return VerifyGraph(*self.record(verify))

    def _members(self, plan: Plan, needs: Needs) -> Members:
        index = self._inputs[_NUMBERS : _NUMBERS + plan.requests]
        return Members(index, self.present(index), self._most_owned(plan, needs))

    def present(self, index: torch.Tensor) -> Items[Sequence]:
        """Who will be at `index` in a replay, for attention's reference: kernels need not know."""
        return ()

    def _most_owned(self, plan: Plan, needs: Needs) -> int:
        """Slots that a rank has for its own requests; 0 where ranks hold none."""
        owners = self._steps.net.num_owners
        if owners == 1:
            return 0
        return min(max(-(-plan.requests // owners), needs.crowd), plan.requests)

    def record(self, body: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture what `body` launches, and where it leaves its results."""
        begin = time.perf_counter()

        def warm_up() -> None:  # padding writes the spare row only
            for _ in range(2):
                body()

        def first() -> T:
            # taken whole, and given back to the pool at once: tiers captured one after the other
            # would each add what the last one left too small
            torch.empty(self._pool_bytes, dtype=torch.uint8, device=self._inputs.device)
            return body()

        whole = self._pool is None and self._pool_bytes > 0
        graph, out = capture(first if whole else body, warm_up=warm_up, pool=self._pool)
        # one pool: rounds never run at the same time, so their scratch may be the same
        self._pool = self._pool or graph.pool()
        self._note_capture(1e3 * (time.perf_counter() - begin))
        return graph, out

    def _note_capture(self, ms: float) -> None:
        self._took.append(ms)
        if len(self._took) >= _TELLING:
            self.capture_ms = median(self._took)
