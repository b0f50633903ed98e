"""The exchanges of tensors between ranks, and two ways to make them: alone, and through torch.

`engine.dist.pynccl` is the third way, on GPUs. Every rank must enter every call, with equal shapes.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from engine.kernels.norms import add_rms_norm


class Collectives(Protocol):
    """Exchanges on the device that tensors live on, ordered with other work on its stream."""

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""

    @property
    def size(self) -> int:
        """Ranks in all."""

    @property
    def name(self) -> str:
        """What makes the exchanges, for the log."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, bit for bit the same on each; may be `x` itself, overwritten."""

    def add_rms_norm(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        place: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum `delta` over ranks, add it to the residual stream, and norm that.

        Args:
            delta: [T, H], this rank's part; may be overwritten.
            residual: [T, H] in its dtype.
            weight: [H].
            eps: Added to the mean square.
            place: 0, 1 or 2, another one than in the call before.

        Returns:
            The normed sum and the sum, both [T, H], bit for bit the same on each rank.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, in rank order: [size, *x.shape]."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; may be `x` itself, overwritten."""

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        """Send rows of `x` to every rank and receive rows from every rank into `out`.

        Args:
            out: [rows received, ...], rank 0's first; overwritten.
            x: [rows sent, ...], those for rank 0 first; as `out` but for the first dimension.
            out_splits: Rows received from each rank; 0 is allowed. None: the same from each.
            in_splits: Rows sent to each rank; 0 is allowed. None: the same to each.
        """

    def abort(self) -> None:
        """Let go of exchanges that cannot end any more; nothing may be exchanged afterwards."""


def split_rows(rows: int, splits: list[int] | None, size: int, what: str) -> list[int]:
    """Rows to or from each rank, checked.

    Args:
        rows: Rows of the tensor.
        splits: As asked for; None cuts evenly.
        size: Ranks.
        what: The tensor's name.

    Raises:
        ValueError: They do not add up.
    """
    if splits is None:
        if rows % size:
            raise ValueError(f"{what}: {rows} rows cannot be cut into {size} equal parts")
        return [rows // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(f"{what}: {rows} rows cannot be cut into {splits} for {size} ranks")
    return list(splits)


class SumThenNorm(ABC):
    """Sums before a norm by an all-reduce."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may be `x` itself, overwritten."""

    def add_rms_norm(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        _place: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One after the other."""
        return add_rms_norm(self.all_reduce(delta), residual, weight, eps)


class Solo(SumThenNorm):
    """One rank: every exchange is the identity."""

    rank = 0
    size = 1
    name = "one rank"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[1, *x.shape]."""
        return x[None]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        """Copy `x`."""
        out.copy_(x)

    def abort(self) -> None:
        """Nothing is on its way."""


class TorchCollectives(SumThenNorm):
    """Through a process group of torch.distributed: gloo on CPUs, NCCL where pynccl cannot be used.

    Args:
        backend: A torch.distributed backend, e.g. ProcessGroupGloo; not shared with anyone.
        name: What it is called in the log.
    """

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self._name = name

    @property
    def rank(self) -> int:
        """This rank."""
        return int(self._backend.rank())

    @property
    def size(self) -> int:
        """Ranks in all."""
        return int(self._backend.size())

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._name

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where `x` is contiguous."""
        x = x.contiguous()
        self._backend.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[size, *x.shape]."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        # gloo compares shapes, so both sides are flat
        self._backend._allgather_base(out.view(-1), x.contiguous().view(-1)).wait()
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's, in place where `x` is contiguous."""
        x = x.contiguous()
        self._backend.broadcast([x]).wait()
        return x

    def all_to_all_single(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_splits: list[int] | None = None,
        in_splits: list[int] | None = None,
    ) -> None:
        """Variable splits, rows of any shape."""
        received = split_rows(len(out), out_splits, self.size, "out")
        sent = split_rows(len(x), in_splits, self.size, "x")
        self._backend.alltoall_base(out, x.contiguous(), received, sent).wait()

    def abort(self) -> None:
        """Close the connections."""
        self._backend.abort()
