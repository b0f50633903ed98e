"""Results on their way to the host: asked for once, waited for, never polled."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sequence import Sequence
from engine.spec.planner import Decided


class Pending:
    """A tensor that a step will produce."""

    def __init__(self, result: torch.Tensor) -> None:
        """Start the copy to the host, behind everything the current stream has been given.

        Args:
            result: Any shape; may be overwritten by later work on the stream.
        """
        self._event: torch.cuda.Event | None = None
        if result.is_cuda:
            self._host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._host.copy_(result, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = result.clone()

    def wait(self) -> NDArray[Any]:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


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
