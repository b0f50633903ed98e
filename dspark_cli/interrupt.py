"""Ctrl-C in two stages: the first drains, the second stops; a written row is never lost."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt, which typer turns into an exit without a word."""


class StopNow(Interrupted):
    """Raised in the main thread when the run must end at once."""


class Interrupts:
    """SIGINT and SIGTERM handling for the time of a run.

    Before `running` is set, the first signal stops at once: there is nothing to drain. Afterwards
    the first signal sets `draining`, and a second one, or `grace` seconds, raises StopNow.

    Args:
        grace: Seconds that running rows get to end.
        say: Tells the user what happens.
    """

    def __init__(self, grace: float, say: Any) -> None:
        self.grace = grace
        self.running = False
        self.draining = False
        self.stopped = False
        self._say = say
        self._waiting = False
        self._shielded = False
        self._pending = False
        self._dropped: float | None = None
        """Seconds of grace that were left when a first signal's StopNow was dropped."""

        self._old: dict[int, Any] = {}
        self._hook: Any = None

    def __enter__(self) -> Self:
        """Take the signals over."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._on_signal)
        self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_unraised
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back."""
        sys.unraisablehook = self._hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def rest(self) -> None:
        """Nothing runs any more: the next signal stops at once."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.running = False

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Let a write end before StopNow is raised."""
        if self._shielded:
            yield
            return
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
        if self._pending:
            self._pending = False
            self._stop()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a read that may block for ever: the first signal raises StopNow out of it.

        The caller turns it into the end of the input, so that running rows still end.
        """
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.running or self.draining:
            self._stop()
            return
        self.draining = True
        self._say(
            f"stopping: running rows get {self.grace:g} s to end, no new ones start; "
            "Ctrl-C again stops at once"
        )
        signal.setitimer(signal.ITIMER_REAL, max(self.grace, 0.001))
        if self._waiting:
            raise StopNow

    def _on_unraised(self, what: Any) -> None:
        """A destructor was running: Python drops what is raised there. Again, right after it."""
        if not issubclass(what.exc_type, Interrupted):
            self._hook(what)
            return
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0.001)
        self._dropped = None if self.stopped else max(left, 0.001)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if self._dropped is None:
            self._stop()
            return
        signal.setitimer(signal.ITIMER_REAL, self._dropped)
        self._dropped = None
        if self._waiting:
            raise StopNow

    def _stop(self) -> None:
        if self._shielded:
            self._pending = True
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.stopped = True
        self._waiting = False
        raise StopNow


class Deadline:
    """True at most once every `seconds`.

    Args:
        seconds: The period.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic() + seconds

    def due(self) -> bool:
        """Whether the period has passed since the last True."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True


@contextmanager
def held_back() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until the block is done: it loads libraries.

    An exception that a handler raises while an extension module is being initialised goes through
    code that ends the process for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    old = {
        number: signal.signal(number, lambda number, _frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
