"""Results on their way to the host: asked for once, waited for, never polled."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.copy_to_host import copy_to_host
from engine.sequence import Sequence
from engine.spec.plan import Decided

_SHAPES = 64
"""Shapes to keep memory for: more than there are captured ones. Rounds that are launched kernel by
kernel have one for each number of requests, a gigabyte together if there are thousands."""


class Downloads:
    """Where results of one device land: pinned memory, and events, that are used again."""

    def __init__(self) -> None:
        """Nothing has been asked for yet."""
        self._free: dict[tuple[torch.Size, torch.dtype], list[Landing]] = {}
        self._taken: dict[int, Landing] = {}
        """By id. A kernel that torch knows nothing of will write there, also where nobody waits."""

    def take(self, like: torch.Tensor) -> "Landing":
        """Memory for a result such as `like`."""
        free = self._free.get((like.shape, like.dtype))
        if free:
            landing = free.pop()
        else:
            there = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
            landing = Landing(there, there.numpy(), torch.cuda.Event())
        self._taken[id(landing)] = landing
        return landing

    def give_back(self, landing: "Landing") -> None:
        """Its result has been read."""
        self._taken.pop(id(landing), None)
        there = landing.there
        if len(self._free) >= _SHAPES:
            self._free.clear()
        self._free.setdefault((there.shape, there.dtype), []).append(landing)


class Landing(NamedTuple):
    """Pinned memory, and when it is filled."""

    there: torch.Tensor
    values: NDArray[Any]
    filled: torch.cuda.Event


class Pending:
    """The first values of a tensor that a step will produce."""

    def __init__(
        self, result: torch.Tensor, downloads: Downloads, count: int | None = None
    ) -> None:
        """Start the copy to the host, behind everything the current stream has been given.

        Args:
            result: [R, ...]; may be overwritten by later work on the stream.
            downloads: Of its device.
            count: Of the first dimension, those that count; None: all.
        """
        self._downloads = downloads
        self._count = len(result) if count is None else count
        self._landing: Landing | None = None
        if result.is_cuda:
            self._landing = downloads.take(result)
            copy_to_host(self._landing.there, result)
            self._landing.filled.record()
        else:
            self._values = result.clone().numpy()

    def wait(self) -> NDArray[Any]:
        """The values [count, ...], once they are there; the caller's own."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.filled.synchronize()
            self._values = landing.values[: self._count].copy()
            self._downloads.give_back(landing)
        return self._values[: self._count]


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a round brought, on the host. R requests, W = G+1 tokens at most, 1 of a plain step."""

    committed: NDArray[np.int64]  # [R] in [1, W]; 0 where a logit that decides is not finite
    verify_lens: NDArray[np.int64]  # [R] in [1, W]
    token_ids: NDArray[np.int64]  # [R, W], -1 after the committed ones
    survival: NDArray[np.float64] | None  # [R, G]; None without a confidence head

    @classmethod
    def unpack(cls, values: NDArray[np.int64], width: int) -> "RoundResult":
        """Take apart what `engine.kernels.commit` put together.

        Args:
            values: [R, 2 + W] or [R, 2 + W + G].
            width: W.
        """
        bits = values[:, 2 + width :].astype(np.int32)
        return cls(
            values[:, 0],
            values[:, 1],
            values[:, 2 : 2 + width],
            bits.view(np.float32).astype(np.float64) if bits.shape[1] else None,
        )


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    members: list[tuple[Sequence, int]]
    """Who gets a result, in order, and in which epoch of theirs."""

    pending: Pending
    decided: Decided | None = None
    """What the round does; None for a prefill."""

    begin: float = 0.0
    launched: float = 0.0
    """Clock times of a round: the host began to decide it, and was done with it."""
