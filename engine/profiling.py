"""Measures what rounds cost on the engine as it is: the draft pass, plain steps, verification.

Rounds are launched as the engine launches them, graphs included, on rows that belong to nobody and
whose KV is whatever lies there: a round takes as long whatever the numbers say. All cells are
measured in turn, several times over, so that a machine that slows down favours none; a cell's time
is its shortest, since whatever else runs on the machine only ever adds to it.
"""

import platform
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from statistics import median
from typing import Any, TypeVar

import torch

from engine.errors import CapacityError
from engine.kernels.acceptance import Drafts
from engine.kv.blocks import BlockPool
from engine.request import Request, SamplingParams
from engine.runner.model_runner import ModelRunner
from engine.sequence import Sequence
from engine.spec.cost_table import Cell, CostTable, KvCost
from engine.spec.plan import Plan
from engine.spec.tiers import Tiers

T = TypeVar("T")
Progress = Callable[[str, int, int], None]

_NEAR, _FAR = 128, 640
"""KV tokens a request: where times are measured, and where the share of KV is told from."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Something to time."""

    requests: int
    context: int
    plan: Plan
    draft: bool = False
    """The draft pass, or what follows it?"""


def probe_sizes(most: int) -> list[int]:
    """Batch sizes to measure for up to `most` requests: powers of 8, and the largest."""
    sizes = [8**i for i in range(11) if 8**i < most]
    return [*sizes, most]


class CostMeter:
    """Fills cost tables; nothing may run meanwhile.

    Args:
        runner: Whose rounds.
        pools: Its KV blocks, by owner of the rows: row r is the r % N-th one's.
        fingerprint: Of the pair and the device.
        max_model_len: Of a request.
        has_survival: Can a round verify some of its drafts?
    """

    def __init__(
        self,
        runner: ModelRunner,
        pools: Items[BlockPool],
        fingerprint: dict[str, str],
        max_model_len: int,
        *,
        has_survival: bool,
    ) -> None:
        self._runner, self._pools = runner, pools
        self._fingerprint = fingerprint
        self._gamma = runner.net.num_speculative_tokens
        self._max_model_len = max_model_len
        self._has_survival = has_survival
        self._block = runner.net.target_kv.kv_block_size
        self._on_gpu = runner.rows.device.type == "cuda"

    def measure(
        self,
        most: int,
        on_progress: Progress,
        *,
        sizes: Items[int] | None = None,
        widths: Items[int] | None = None,
        repeats: int | None = None,
    ) -> CostTable:
        """Measure rounds of up to `most` requests.

        Args:
            most: Requests at once.
            on_progress: Called with ("measure rounds", passes done, of how many).
            sizes: Batch sizes, rising; None: a few.
            widths: Verify tokens per request; None: a few. All drafts come in any case.
            repeats: Passes over all of them; None: a few.

        Raises:
            CapacityError: KV memory is too small for so many.
        """
        room = self.room
        if most > room:
            raise CapacityError(
                f"KV memory has blocks for {room} requests at once, {most} are to be measured",
                "measure fewer, or use a larger --kv-cache-memory-bytes",
            )
        probes = self._tiers(sizes or probe_sizes(most))
        repeats = repeats or (5 if self._on_gpu else 2)
        near = self._context(probes[-1], _NEAR)
        far = self._context(probes[-1], _FAR)
        works = [w for size in probes for w in self._works(size, near, widths)]
        if far >= 2 * near:
            works += self._works(probes[-1], far, [])
        times: dict[_Work, list[float]] = {work: [] for work in works}
        with self._untimed():
            if self._on_gpu:  # compiles and captures
                self._pass({work: [] for work in works})
            for trial in range(repeats):
                on_progress("measure rounds", trial, repeats)
                self._pass(times)
        on_progress("measure rounds", repeats, repeats)
        draft, plain, verify = self._cells(times, near)
        return CostTable(
            fingerprint=self._fingerprint,
            context=near,
            draft=draft,
            plain=plain,
            verify=verify,
            kv=self._kv_cost(times, near, far),
            about=self._about(repeats),
        )

    def _about(self, repeats: int) -> dict[str, Any]:
        """Shapes, tiers and versions, for people."""
        net, graphs = self._runner.net, self._runner.graphs
        tiers = None if graphs is None else Tiers(self._runner.rows.spare, self._gamma)
        return {
            "repeats": repeats,
            "threads": None if self._on_gpu else torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": metadata.version("triton"),
            "shapes": {
                "target": asdict(net.target.spec),
                "draft": asdict(net.draft.spec) if net.draft else None,
            },
            "tiers": None
            if tiers is None
            else {"requests": tiers.requests, "tokens_per_request": tiers.widths},
        }

    @property
    def room(self) -> int:
        """The largest batch of one token each that there are KV blocks for; nothing may run."""
        need = -(-(1 + self._gamma + 1) // self._block)
        room = max(min(pool.num_free for pool in self._pools) // need * len(self._pools), 1)
        if self._runner.graphs is None:
            return room
        tiers = Tiers(self._runner.rows.spare, self._gamma)
        return max(slots for slots in tiers.requests if slots <= room)

    def _tiers(self, sizes: Items[int]) -> list[int]:
        """Sizes as they run: slots of a graph tier."""
        if self._runner.graphs is None:
            return list(sizes)
        tiers = Tiers(self._runner.rows.spare, self._gamma)
        return sorted({tiers.fit(size) for size in sizes})

    def _works(self, size: int, context: int, widths: Items[int] | None) -> list[_Work]:
        """Draft pass, plain step and verifications of one batch size."""
        if widths is None:  # small batches verify everything for about the price of a token
            widths = [2, 4] if size > 8 else []
        whole = self._gamma + 1
        chosen = sorted({*(w for w in widths if 1 < w < whole), whole})
        plans = [Plan("compact", size * (w - 1), size, size * w) for w in chosen]
        if not self._has_survival:
            plans = [Plan("full", None, size, size * whole)]
        return [
            _Work(size, context, plans[-1], draft=True),
            _Work(size, context, Plan("plain", None, size, size)),
            *(_Work(size, context, plan) for plan in plans),
        ]

    def _context(self, num_reqs: int, wanted: int) -> int:
        """The longest context up to `wanted` that so many requests have KV for; at least 1."""
        each = -(-num_reqs // len(self._pools))
        blocks = min(pool.num_free for pool in self._pools) // each
        room = min(blocks * self._block, self._max_model_len) - self._gamma - 1
        return max(1, min(wanted, room))

    def _pass(self, times: dict[_Work, list[float]]) -> None:
        """Everything once."""
        for size, context in dict.fromkeys((w.requests, w.context) for w in times):
            with self._requests(size, context) as batch:
                drafts: Drafts | None = None
                for work, taken in times.items():
                    if (work.requests, work.context) == (size, context):
                        ms, drafts = self._once(batch, work, drafts)
                        taken.append(ms)

    def _once(
        self, batch: Items[Sequence], work: _Work, drafts: Drafts | None
    ) -> tuple[float, Drafts | None]:
        """Milliseconds, and the drafts that the next work of the batch is given."""
        self._place(batch, work.context)
        runner, plan = self._runner, work.plan
        whole = Plan("full", None, work.requests, work.requests * (self._gamma + 1))

        def ahead() -> object:
            return runner.draft(batch, whole)

        if work.draft:
            return self._time(lambda: runner.draft(batch, plan), ahead)
        given = None if plan.path == "plain" else drafts
        return self._time(lambda: runner.verify(batch, plan, given), ahead)[0], drafts

    def _time(self, work: Callable[[], T], ahead: Callable[[], object]) -> tuple[float, T]:
        """Milliseconds between events on a CUDA device, else of the thread or of wall time.

        Args:
            work: What to time.
            ahead: Keeps a device busy while `work` is launched.
        """
        if not self._on_gpu:
            # what other programs take is not of the round; with several threads there is no
            # telling, and waits for other ranks are of it
            alone = torch.get_num_threads() == 1 and self._runner.net.ranks.size == 1
            clock = time.thread_time if alone else time.perf_counter
            begin = clock()
            out = work()
            return (clock() - begin) * 1e3, out
        torch.cuda.synchronize()
        ahead()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)), out

    def _cells(
        self, times: dict[_Work, list[float]], near: int
    ) -> tuple[tuple[Cell, ...], tuple[Cell, ...], tuple[Cell, ...]]:
        """Draft, plain and verify cells at the near context."""
        draft: list[Cell] = []
        plain: list[Cell] = []
        verify: list[Cell] = []
        for work, taken in times.items():
            if work.context != near:
                continue
            tokens = work.requests * self._gamma if work.draft else work.plan.tokens
            cell = Cell(work.requests, tokens, min(taken), median(taken) - min(taken))
            into = draft if work.draft else plain if work.plan.path == "plain" else verify
            into.append(cell)
        return tuple(draft), tuple(plain), tuple(verify)

    def _kv_cost(self, times: dict[_Work, list[float]], near: int, far: int) -> KvCost:
        """Milliseconds per KV token, from the same rounds at two contexts."""
        plain = whole = 0.0
        for work, taken in times.items():
            if work.context == near:
                continue
            twin = _Work(work.requests, near, work.plan, work.draft)
            more = (min(taken) - min(times[twin])) / ((far - near) * work.requests)
            if work.plan.path == "plain":
                plain += more
            else:
                whole += more
        return KvCost(max(plain, 0.0), max(whole, 0.0))

    def _place(self, batch: Items[Sequence], context: int) -> None:
        rows = self._runner.rows
        index = rows.uploads.send_integers([s.row for s in batch])
        anchors = torch.full_like(index, batch[0].token_ids[-1])
        rows.place(index, torch.full_like(index, context), anchors)

    @contextmanager
    def _requests(self, num_reqs: int, context: int) -> Iterator[list[Sequence]]:
        """Requests in the first rows, with blocks for a context and one round."""
        need = -(-(context + self._gamma + 1) // self._block)
        params, ids = SamplingParams(), (0,) * (context + 1)
        batch = []
        for row in range(num_reqs):
            sequence = Sequence(Request(request_id="", prompt_token_ids=ids, params=params))
            sequence.row, sequence.num_computed = row, context
            sequence.block_ids = self._pools[row % len(self._pools)].take(need)
            batch.append(sequence)
        try:
            self._runner.start(batch)
            self._runner.set_blocks(batch)  # a round brings few new ones, and none of these do
            yield batch
        finally:
            for sequence in batch:
                self._pools[sequence.row % len(self._pools)].give_back(sequence.block_ids)

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Measured rounds are not the run's: its clock does not count them."""
        seconds = self._runner.clock.seconds
        before = dict(seconds)
        try:
            with torch.inference_mode():
                yield
        finally:
            if self._on_gpu:
                torch.cuda.synchronize()
            self._runner.clock.settle()
            seconds.clear()
            seconds.update(before)
