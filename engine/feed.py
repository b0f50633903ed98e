"""Requests that arrive while an engine runs, in the form in which Engine.run asks for them."""

from collections import deque
from collections.abc import Iterable, Iterator
from threading import Condition

from engine.request import Request


class Feed:
    """A source of requests that other threads fill.

    Whoever takes the engine's results says so with `settle`: only while something runs may the
    engine be told "nothing yet", else it waits here.
    """

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._changed = Condition()
        self._running = 0
        self._ended = False

    def __iter__(self) -> Iterator[Request | None]:
        """Itself."""
        return self

    def __next__(self) -> Request | None:
        """The next request; None while there is none and others run.

        Raises:
            StopIteration: There are no more to come.
        """
        with self._changed:
            while not self._waiting:
                if self._ended:
                    raise StopIteration
                if self._running:
                    return None
                self._changed.wait()
            self._running += 1
            return self._waiting.popleft()

    def put(self, requests: Iterable[Request]) -> None:
        """Add requests."""
        with self._changed:
            self._waiting.extend(requests)
            self._changed.notify_all()

    def settle(self) -> bool:
        """One of those given has its result; True if none runs or waits any more."""
        with self._changed:
            self._running -= 1
            return self._running == 0 and not self._waiting

    def end(self) -> None:
        """There will be no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
