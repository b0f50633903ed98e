"""Sums of products dealt to ranks, through memory that the GPUs of one host map from each other.

NCCL's all-reduce takes some 9 us however little it sums, 72 times a round of an 8B model. Here the
launch that adds a sum to the residual stream and norms it makes the sum as well
(engine.kernels.sum_norm). Everything else is the base's, and so are sums too large to gain by it.
Which way is taken at which size is measured at start-up; rank 0's times count for all.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from engine.dist.collectives import Collectives
from engine.dist.control import Control
from engine.dist.ipc import CudaRuntime
from engine.dist.timing import milliseconds
from engine.kernels.sum_norm import Mailbox, Post, sum_norm_triton

SIZES = tuple(1 << power for power in range(13, 25))
"""Bytes, 8 KiB to 16 MiB, at which the ways are compared."""

BASE, NUMBERED, PLAIN = "base", "numbered", "plain"
"""Ways to sum."""

_WORDS = 1 << 18
"""4-byte words of a numbered message at most: 1 MiB, sent as 2."""

_TIMED_WIDTH = 4096
_EPS = 1e-6


class Mapped:
    """Collectives whose sums before a norm have more than one way.

    Args:
        base: Makes the rest.
        runtime: Has mapped the mailboxes.
        post: The ranks' mailboxes.
    """

    def __init__(self, base: Collectives, runtime: CudaRuntime, post: Post) -> None:
        self._base = base
        self._runtime = runtime
        self._post = post
        self._released = False
        self.rank, self.size = base.rank, base.size
        self.all_reduce, self.all_gather = base.all_reduce, base.all_gather
        self.broadcast, self.all_to_all_single = base.broadcast, base.all_to_all_single
        self.taken = [BASE] * len(SIZES)
        """Ways, by size."""

    @property
    def name(self) -> str:
        """The base's name, and what is made otherwise."""
        parts = [self._base.name]
        for way in (NUMBERED, PLAIN):
            sizes = [size for size, taken in zip(SIZES, self.taken, strict=True) if taken == way]
            if sizes:
                parts.append(f"{way} sums up to {sizes[-1] >> 10} KiB")
        return ", ".join(parts)

    def choose(self, control: Control, dtype: torch.dtype) -> None:
        """Measure every way at every size; what rank 0 finds is true for every rank."""
        device: torch.device = self._post.calls.device
        best = []
        for num_bytes in SIZES:
            ways = self.ways(num_bytes // _TIMED_WIDTH // dtype.itemsize, _TIMED_WIDTH, dtype)
            times = {way: milliseconds(call, device) for way, call in ways.items()}
            best.append(min(times, key=lambda way: times[way]))
        self.taken = list(control.tell(best))

    def ways(
        self, rows: int, width: int, dtype: torch.dtype
    ) -> dict[str, Callable[[], torch.Tensor]]:
        """Calls that sum [rows, width] of every rank and norm that, by way."""
        x = torch.zeros(rows, width, dtype=dtype, device=self._post.calls.device)
        weight, turn = x.new_zeros(width), [0]

        def mapped(*, numbered: bool) -> torch.Tensor:
            turn[0] ^= 1
            return sum_norm_triton(self._post, turn[0], x, x, weight, _EPS, numbered=numbered)[0]

        ways: dict[str, Callable[[], torch.Tensor]] = {
            BASE: lambda: self._base.add_rms_norm(x, x, weight, _EPS, 0)[0]
        }
        if self._post.numbers(x):
            ways[NUMBERED] = lambda: mapped(numbered=True)
        if self._post.takes(x):
            ways[PLAIN] = lambda: mapped(numbered=False)
        return ways

    def add_rms_norm(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        place: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The way that is fastest for its size."""
        at = bisect_left(SIZES, delta.numel() * delta.element_size())
        way = self.taken[at] if at < len(SIZES) else BASE
        if way == NUMBERED and not self._post.numbers(delta):
            way = PLAIN
        if way == BASE:
            return self._base.add_rms_norm(delta, residual, weight, eps, place)
        return sum_norm_triton(
            self._post, place, delta, residual, weight, eps, numbered=way == NUMBERED
        )

    def abort(self) -> None:
        """Let go of the base's exchanges, and of sums that wait for ranks which are no more."""
        first, self._released = not self._released, True
        if first:
            with suppress(RuntimeError):  # a lost device waits for nobody either
                self._runtime.write(self._post.stop.data_ptr(), 1)
        self._base.abort()
        if first:
            box = self._post.boxes[self.rank]
            needed = Mailbox.bytes_needed(box.size, box.words, box.num_bytes)
            self._runtime.release(box.base, needed)


def with_mapped_memory(
    base: Collectives, control: Control, device: torch.device
) -> tuple[Collectives, str]:
    """What the GPUs of one host sum through, and why if that is `base`. Every rank calls it."""
    needed = Mailbox.bytes_needed(base.size, _WORDS, SIZES[-1])
    runtime, mine, handle, reason = None, 0, None, ""
    try:
        runtime = CudaRuntime()
        mine = runtime.allocate(needed)
        handle = runtime.share(mine)
    except (OSError, RuntimeError) as error:
        reason = str(error)
    handles = control.exchange(handle)
    made: Mapped | None = None
    if runtime is not None and all(h is not None for h in handles):
        try:
            bases = [mine if r == base.rank else runtime.map(h) for r, h in enumerate(handles)]
            boxes = [Mailbox(at, base.size, _WORDS, SIZES[-1]) for at in bases]
            made = Mapped(base, runtime, Post.of(base.rank, boxes, device))
        except RuntimeError as error:
            reason = str(error)
    reasons = [r for r in control.exchange(None if made is not None else reason) if r is not None]
    if reasons or made is None:
        if runtime is not None and mine:
            runtime.release(mine, needed)
        return base, max(reasons, key=len)
    made.choose(control, torch.bfloat16)
    return made, ""
