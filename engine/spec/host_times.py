"""What the host needs for a round, beside the device: the cost table knows nothing of it.

With a small model and many requests, appending tokens takes the host longer than the device takes
for a step. On a CUDA device the host prepares a round while the one before it runs, so a round
takes the longer of the two; on a CPU it takes their sum. Learned on the way, as the least that was
seen lately: whatever else the host does only ever adds to it.
"""

from typing import overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RISE = 1.02
"""What the least seen may rise by in a round."""


class HostTimes:
    """Milliseconds by size of the batch, in octaves, and by whether drafts are checked."""

    def __init__(self, *, overlapped: bool) -> None:
        """Know nothing.

        Args:
            overlapped: Does the device work meanwhile?
        """
        self._overlapped = overlapped
        self._least: dict[tuple[int, bool], float] = {}

    def note(self, num_reqs: int, ms: float, *, drafted: bool) -> None:
        """A round of `num_reqs` requests took the host `ms` milliseconds."""
        key = num_reqs.bit_length(), drafted
        self._least[key] = min(ms, self._least.get(key, ms) * _RISE)

    def of(self, num_reqs: int, *, drafted: bool) -> float:
        """Milliseconds expected; of the other kind of round, or 0, where none was seen."""
        size = num_reqs.bit_length()
        other = self._least.get((size, not drafted), 0.0)
        return self._least.get((size, drafted), other)

    @overload
    def with_device(self, device_ms: float, num_reqs: int, *, drafted: bool) -> float: ...
    @overload
    def with_device(self, device_ms: Floats, num_reqs: int, *, drafted: bool) -> Floats: ...
    def with_device(
        self, device_ms: float | Floats, num_reqs: int, *, drafted: bool
    ) -> float | Floats:
        """Milliseconds of whole rounds that take the device `device_ms`."""
        host = self.of(num_reqs, drafted=drafted)
        if not self._overlapped:
            return device_ms + host
        if isinstance(device_ms, float):
            return max(device_ms, host)
        return np.maximum(device_ms, host)
