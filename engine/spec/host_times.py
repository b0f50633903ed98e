"""What the host needs for a round, beside the device: the cost table knows nothing of it.

With a small model and many requests, appending tokens takes the host longer than the device takes
for a step. On a CUDA device the host prepares a round while the one before it runs, so a round
takes the longer of the two; on a CPU it takes their sum. Learned on the way, as the least that was
seen lately: whatever else the host does only ever adds to it.

That else is counted by token: most of it are newcomers and those who end, which a request is once,
in however many rounds it is decoded. A newcomer takes the host, and its prefill the device: only
what the host needs longer keeps rounds waiting. What prefills take the device longer pays for
nothing, as the host is one turn ahead at most.
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
"""A turn's else counts up to so many times its round: what is longer is a pause of the machine."""


class HostTimes:
    """Milliseconds by size of the batch, in octaves, and by whether drafts are checked."""

    def __init__(self, *, overlapped: bool) -> None:
        """Know nothing.

        Args:
            overlapped: Does the device work meanwhile?
        """
        self._overlapped = overlapped
        self._least: dict[tuple[int, bool], float] = {}
        self._over, self._beside, self._tokens = 0.0, 0.0, 0.0
        """Lately, ms: what turns with a round alone took beyond the least, and others beyond that
        and their prefills; and tokens committed."""

    def note(
        self,
        ms: float,
        round_: tuple[int, bool] | None,
        *,
        alone: bool = True,
        prefill_ms: float = 0.0,
        tokens: int = 0,
    ) -> None:
        """What a turn took.

        Args:
            ms: The host.
            round_: Its round's requests, and whether drafts are checked in it; None: it has none.
            alone: Was there this round and nothing else?
            prefill_ms: What prefills took the device, as far as that has been heard of since.
            tokens: Committed in it.
        """
        least = 0.0
        if round_ is not None:
            key = round_[0].bit_length(), round_[1]
            known = self._least.get(key, ms)
            least = self._least[key] = min(ms, known * _RISE if alone else known)
        more = min(ms - least, _PAUSE * max(least, 1.0))
        self._over = self._over * _MEMORY + (more if alone else 0.0)
        self._beside = self._beside * _MEMORY + (0.0 if alone else more) - prefill_ms
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
        each = (self._over + max(self._beside, 0.0)) / self._tokens if self._tokens else 0.0
        if isinstance(device_ms, float) and isinstance(tokens, float):
            return max(device_ms, host + each * tokens)
        return np.maximum(device_ms, host + each * tokens)
