"""Results on their way to the host: asked for once, waited for, never polled."""

from dataclasses import dataclass

import torch

from engine.sequence import Sequence


class Pending:
    """An integer tensor that a step will produce."""

    def __init__(self, result: torch.Tensor) -> None:
        """Start the copy to the host, behind everything the current stream has been given.

        Args:
            result: Integers, any shape; may be overwritten by later work on the stream.
        """
        self._event: torch.cuda.Event | None = None
        if result.is_cuda:
            self._host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._host.copy_(result, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = result.clone()

    def wait(self) -> list[list[int]]:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way."""

    members: list[tuple[Sequence, int]]
    """Who gets a result, in order, and in which epoch of theirs."""

    pending: Pending
    is_round: bool
