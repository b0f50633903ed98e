"""Where the wall time of a run went: load, warm-up, measured passes, what is between."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from evals.latency import Window, check_windows
from evals.numbers import require


@dataclass(slots=True)
class Timeline:
    """Where the wall time of the whole run went: windows without gaps, from `start` on."""

    clock: Callable[[], float]
    start: float
    windows: list[Window] = field(default_factory=list)

    def lap(self, name: str, until: float | None = None) -> None:
        """The time since the last lap was spent on `name`."""
        end = self.clock() if until is None else until
        self.windows.append(Window(name, self._last, end))

    @property
    def _last(self) -> float:
        return self.windows[-1].end if self.windows else self.start

    def totals(self) -> dict[str, float]:
        """Seconds by name, checked to make up the wall time.

        Raises:
            IdentityError: They do not.
        """
        check_windows(self.windows, self.start, self._last)
        totals: dict[str, float] = {}
        for window in self.windows:
            totals[window.name] = totals.get(window.name, 0.0) + window.seconds
        wall = self._last - self.start
        require(math.isclose(sum(totals.values()), wall, abs_tol=1e-6), "windows are not wall time")
        return totals
