"""What became of the other ranks, and the end of this process where nothing else can end it.

A rank that waits for a dead one may wait in a library that no exception reaches. So the news goes
three ways: exchanges under way are aborted, the next look (`check`) raises it, and if neither helps
within `PATIENCE_S` the process ends with the news on the screen.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.dist.control import RankError

PATIENCE_S = 5.0
"""From the news to the end of the process, unless somebody raised it."""

STEP_TIMEOUT_S = 120.0
"""Longest wait for one step's exchanges."""

_LOOK_S = 0.25
_SETTLE_S = 0.5  # a dead rank's neighbours may be noticed before itself


class Watch:
    """One per process with several ranks.

    Args:
        timeout: Seconds that a wait marked by `waiting` may take.
    """

    def __init__(self, timeout: float = STEP_TIMEOUT_S) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._news: list[tuple[int, RankError]] = []
        self._first: float | None = None
        self._raised = False
        self._closed = threading.Event()
        self._since: float | None = None
        self._abort: Callable[[], None] = lambda: None
        self._aborted = False
        threading.Thread(target=self._look, name="dspark-watch", daemon=True).start()

    def on_failure(self, abort: Callable[[], None]) -> None:
        """Call `abort` once, from another thread, when a rank has failed."""
        self._abort = abort

    def report(self, error: RankError, weight: int = 1) -> None:
        """A rank has failed; the heaviest report is told, the first of equals.

        Args:
            error: What to tell.
            weight: 0 for a rank that only lost another one, 1 for the one that failed.
        """
        with self._lock:
            if not self._closed.is_set():
                self._news.append((weight, error))
                self._first = self._first or time.monotonic()

    def check(self) -> None:
        """Raise what was reported, if anything.

        Raises:
            RankError: A rank has failed.
        """
        if self._news:
            self._settle()
            raise self._told()

    def hear(self) -> RankError | None:
        """Another rank's failure, if one comes to light soon: what failed here may be its doing."""
        until = time.monotonic() + 4 * _SETTLE_S
        while not self._news and time.monotonic() < until:
            time.sleep(0.02)
        if not self._news:
            return None
        self._settle()
        return self._told()

    def explain(self, error: Exception) -> Exception:
        """Why an exchange failed with `error`: another rank's failure, if one comes to light."""
        return self.hear() or RankError(
            f"the connection between ranks broke: {error}", "see what the other ranks said"
        )

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for the other ranks, which must not take longer than the timeout."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """The ranks part in peace: nothing is news from here on."""
        with self._lock:
            self._closed.set()

    def _told(self) -> RankError:
        self._raised = True
        return max(self._news, key=lambda item: item[0])[1]

    def _settle(self) -> None:
        until = (self._first or 0.0) + _SETTLE_S
        while time.monotonic() < until and not any(weight for weight, _ in self._news):
            time.sleep(0.02)

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            since, now = self._since, time.monotonic()
            if since is not None and now - since > self._timeout:
                self.report(
                    RankError(f"no answer from the other ranks for {self._timeout:.0f} s"), 0
                )
            if self._first is None:
                continue
            if not self._aborted:
                self._aborted = True
                # what waits on the device wakes up, and `check` follows
                threading.Thread(target=self._abort, daemon=True).start()
            if not self._raised and now - self._first > PATIENCE_S:
                self._end()

    def _end(self) -> None:
        """Nobody could be told: say it and go. What the journal holds is on the disk."""
        error = max(self._news, key=lambda item: item[0])[1]
        if sys.stderr is not None:
            text = f"error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else "")
            os.write(2, text.encode("utf-8", "replace"))
        os._exit(error.exit_code or 1)
