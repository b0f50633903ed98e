"""Small values on their way to the device: through pinned memory that is used again and again.

Asking for pinned memory anew costs several calls into the driver each time, and a round of a small
model is over within a millisecond.
"""

from collections.abc import Sequence as Items

import torch

_BYTES = 1 << 20
"""Some hundred rounds of 256 requests."""

_ALIGNED = 16


class Uploads:
    """What one process sends to its device, in the order of one stream.

    Args:
        device: Where to; on a CPU tensors are there already.
        num_bytes: Of pinned memory, a multiple of 32.
    """

    def __init__(self, device: torch.device, num_bytes: int = _BYTES) -> None:
        self._device = device
        self._half = num_bytes // 2
        self._at, self._next = 0, 0
        """Which half, and bytes of it that are in use."""

        if device.type == "cuda":
            self._there = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            self._words = self._there.view(torch.int64)
            self._numbers = self._words.numpy()
            self._left: list[torch.cuda.Event | None] = [None, None]
            """By half: all copies of the last time are done."""

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """A host tensor's values on the device, in its shape and dtype; on a CPU the tensor itself.

        Waits for the device only where that is more than half of the memory behind.
        """
        if self._device.type != "cuda":
            return x
        if x.nbytes > self._half:
            return x.pin_memory().to(self._device, non_blocking=True)
        begin = self._room(x.nbytes)
        there = self._there[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
        there.copy_(x)
        return there.to(self._device, non_blocking=True)

    def send_integers(self, values: Items[int], to: torch.Tensor | None = None) -> torch.Tensor:
        """The same of whole numbers: [n] int64, new or the first n of `to`."""
        count = len(values)
        if self._device.type != "cuda":
            there = torch.tensor(values, dtype=torch.int64)
        elif 8 * count > self._half:
            there = torch.tensor(values, dtype=torch.int64).pin_memory()
        else:
            first = self._room(8 * count) // 8
            self._numbers[first : first + count] = values
            there = self._words[first : first + count]
        if to is None:
            return there.to(self._device, non_blocking=True)
        to = to[:count]
        return to.copy_(there, non_blocking=True)

    def _room(self, num_bytes: int) -> int:
        """Where so many bytes may be written: what was there has been copied."""
        needed = -(-num_bytes // _ALIGNED) * _ALIGNED
        if self._next + needed > self._half:
            event = self._left[self._at] = torch.cuda.Event()
            event.record()
            self._at, self._next = 1 - self._at, 0
            if (before := self._left[self._at]) is not None:
                before.synchronize()
        begin = self._at * self._half + self._next
        self._next += needed
        return begin
