"""All-reduce through memory that the GPUs of one host map from each other, where that is faster.

NCCL's all-reduce takes some 9 us however little it sums. Here every rank reads what the others
have: all of it (one-shot: best for few bytes) or its part, which it then hands round (two-shot).
Sums are taken in rank order, so that all ranks get the same bits. No multicast. Which way is taken
at which size is measured at start-up: rank 0's times count for all.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from engine.dist.collectives import Collectives
from engine.dist.control import Control
from engine.dist.timing import milliseconds

BASE, ONE_SHOT, TWO_SHOT = "base", "one-shot", "two-shot"
SIZES = tuple(1 << power for power in range(13, 25))
"""Bytes, 8 KiB to 16 MiB, at which ways are compared; above, the base makes them all."""

_ALIGN = 16


class Symmetric:
    """Collectives whose all-reduce has more than one way; everything else is the base's.

    Args:
        base: Makes the rest.
        store: A store of the ranks' own.
        name: The same on every rank, and new in each of their processes.

    Raises:
        RuntimeError: The GPUs cannot map each other's memory, or this torch does not know how.
    """

    def __init__(self, base: Collectives, store: Any, name: str) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        self._base = base
        self._ops: Any = torch.ops.symm_mem
        needed = ("one_shot_all_reduce_copy_out", "two_shot_all_reduce_out")
        if not all(hasattr(self._ops, name) for name in needed):
            raise RuntimeError("this torch has no all-reduce through symmetric memory")
        self._name = name
        _SymmetricMemory.set_group_info(name, base.rank, base.size, store)
        # torch 2.11 looks ranks and store up in a process group of that name instead; it never
        # communicates
        self._group = torch.distributed.ProcessGroup(store, base.rank, base.size)
        _registry()._register_process_group(name, self._group)
        here = torch.device("cuda", torch.cuda.current_device())
        self._buffer = _SymmetricMemory.empty_strided_p2p((SIZES[-1],), (1,), torch.uint8, here)
        self._mapped = _SymmetricMemory.rendezvous(self._buffer, name)
        self.ways_taken = [BASE] * len(SIZES)
        """By size."""


    @property
    def rank(self) -> int:
        """This rank."""
        return self._base.rank

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self._base.size

    @property
    def name(self) -> str:
        """The base's name, and what is made otherwise."""
        parts = []
        for way in (ONE_SHOT, TWO_SHOT):
            taken = [size for size, chosen in zip(SIZES, self.ways_taken, strict=True) if chosen == way]
            if taken:
                parts.append(f"{way} up to {taken[-1] >> 10} KiB")
        return ", ".join([self._base.name, *parts])

    def choose(self, control: Control, device: torch.device, dtype: torch.dtype) -> None:
        """Measure every way at every size; rank 0's best ones are every rank's."""
        times = []
        for size in SIZES:
            x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
            calls = self.ways(x).items()
            times.append({way: milliseconds(call, device) for way, call in calls})
        best = [min(found, key=lambda way: found[way]) for found in times]
        self.ways_taken = list(control.tell(best))

    def ways(self, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
        """Calls that sum `x`, by way."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes > SIZES[-1] or num_bytes % (_ALIGN * self.size):
            return {BASE: lambda: self._base.all_reduce(x)}
        return {
            BASE: lambda: self._base.all_reduce(x),
            ONE_SHOT: lambda: self._one_shot(x),
            TWO_SHOT: lambda: self._two_shot(x),
        }

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, the way that is fastest for its size."""
        num_bytes = x.numel() * x.element_size()
        at = bisect_left(SIZES, num_bytes)
        way = self.ways_taken[at] if at < len(SIZES) else BASE
        fits = num_bytes % (_ALIGN * self.size) == 0 and num_bytes > 0
        if way == BASE or not fits or x.dtype not in (torch.bfloat16, torch.float32):
            return self._base.all_reduce(x)
        return self._one_shot(x) if way == ONE_SHOT else self._two_shot(x)

    def _one_shot(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._ops.one_shot_all_reduce_copy_out(
            self._shared(x), x.contiguous(), "sum", self._name, out
        )
        return out

    def _two_shot(self, x: torch.Tensor) -> torch.Tensor:
        shared, out = self._shared(x), torch.empty_like(x)
        shared.copy_(x)
        self._ops.two_shot_all_reduce_out(shared, "sum", self._name, out)
        return out

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """The mapped memory, as `x` is shaped."""
        return self._buffer[: x.numel() * x.element_size()].view(x.dtype).view(x.shape)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]."""
        return self._base.all_gather(x)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`."""
        return self._base.broadcast(x)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        """As the base does."""
        self._base.all_to_all_single(out, x, out_splits, in_splits)

    def abort(self) -> None:
        """Let go of the base's exchanges; ways through mapped memory wait for no library."""
        _registry()._unregister_process_group(self._name)
        self._base.abort()


def _registry() -> Any:
    """Where torch finds process groups by name."""
    from torch._C import _distributed_c10d

    return _distributed_c10d
