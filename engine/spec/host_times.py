"""What the host needs for a round, beside the device: the cost table knows nothing of it.

With a small model and many requests, appending tokens takes the host longer than the device takes
for a step. On a CUDA device the host prepares a round while the one before it runs, so a round
takes the longer of the two; on a CPU it takes their sum. Learned on the way, as the least that was
seen lately: whatever else the host does only ever adds to it.

That else is counted by token: newcomers, and those who end. A request brings it once, in however
many rounds it is decoded. It takes the host, and its prefill the device; where it takes the host
longer, a batch that many come to and leave waits for the host in rounds that would not otherwise.
"""

from typing import overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RISE = 1.02
"""What the least seen may rise by in a round."""

_MEMORY = 0.97
"""Of what else the host does: per turn."""

_PAUSE = 8.0
"""What a turn takes beyond so many times its round is a pause of the machine, and not counted."""


class HostTimes:
    """Milliseconds by size of the batch, in octaves, and by whether drafts are checked."""

    def __init__(self, *, overlapped: bool) -> None:
        """Know nothing.

        Args:
            overlapped: Does the device work meanwhile?
        """
        self._overlapped = overlapped
        self._least: dict[tuple[int, bool], float] = {}
        self._beside, self._tokens = 0.0, 0.0
        """Lately: what else the host did for longer than the device, ms, and tokens committed."""

    def note(self, num_reqs: int, ms: float, *, drafted: bool) -> None:
        """A round of `num_reqs` requests took the host `ms` milliseconds."""
        key = num_reqs.bit_length(), drafted
        self._least[key] = min(ms, self._least.get(key, ms) * _RISE)

    def note_turn(
        self, ms: float, prefill_ms: float, tokens: int, round_: tuple[int, bool] | None
    ) -> None:
        """Any turn: what it did beside a round.

        Args:
            ms: What it took the host.
            prefill_ms: What its prefills took the device.
            tokens: Committed in it.
            round_: Its round's requests, and whether drafts are checked in it.
        """
        least = 0.0 if round_ is None else self.of(round_[0], drafted=round_[1])
        else_ms = min(max(ms - least, 0.0), _PAUSE * max(least, 1.0))
        self._beside = self._beside * _MEMORY + else_ms - prefill_ms
        self._tokens = self._tokens * _MEMORY + tokens

    def of(self, num_reqs: int, *, drafted: bool) -> float:
        """Milliseconds expected; of the other kind of round, or 0, where none was seen."""
        size = num_reqs.bit_length()
        other = self._least.get((size, not drafted), 0.0)
        return self._least.get((size, drafted), other)

    @overload
    def with_device(
        self, device_ms: float, num_reqs: int, tokens: float, *, drafted: bool
    ) -> float: ...
    @overload
    def with_device(
        self, device_ms: Floats, num_reqs: int, tokens: Floats, *, drafted: bool
    ) -> Floats: ...
    def with_device(
        self, device_ms: float | Floats, num_reqs: int, tokens: float | Floats, *, drafted: bool
    ) -> float | Floats:
        """Milliseconds of whole rounds that take the device `device_ms` and commit `tokens`."""
        host = self.of(num_reqs, drafted=drafted)
        if not self._overlapped:
            return device_ms + host
        beside = self._beside / self._tokens if self._tokens else 0.0
        if isinstance(device_ms, float) and isinstance(tokens, float):
            return max(device_ms, host + beside * tokens)
        return np.maximum(device_ms, host + beside * tokens)
