"""Work of an iterator done ahead of its use, in a thread, within bounds."""

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Event, Thread
from typing import Final, Generic, TypeVar

T = TypeVar("T")

ITEMS_AHEAD = 1024
BYTES_AHEAD = 64 << 20


class NotYet:
    """What `get` gives while the next item is still being made."""


NOT_YET: Final = NotYet()


class ReadAhead(Generic[T]):
    """Items of an iterator, in order, made in a thread of its own.

    An exception of the iterator is raised by `get` where its item would have come.

    Args:
        items: Runs in the thread only.
        size: Bytes of an item; the thread rests while it is far enough ahead.
        given_up: Set by `close`: what the iterator waits for must end then.
    """

    def __init__(self, items: Iterator[T], size: Callable[[T], int], given_up: Event) -> None:
        self._items = items
        self._size = size
        self._given_up = given_up
        self._made: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._changed = Condition()
        self._thread = Thread(target=self._work, name="dspark-rows", daemon=True)
        self._thread.start()

    def get(self, *, wait: bool) -> T | NotYet:
        """The next item.

        Args:
            wait: Until there is one; else NOT_YET comes back at once.

        Raises:
            StopIteration: There are no more.
        """
        with self._changed:
            while wait and not self._made and not self._ended:
                self._changed.wait()
            if self._made:
                item, size = self._made.popleft()
                self._bytes -= size
                self._changed.notify_all()
                return item
            if not self._ended:
                return NOT_YET
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """End the thread; what was made and not taken is dropped."""
        self._given_up.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:  # noqa: BLE001  # raised again where items are taken
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Add an item once there is room; False when nobody wants it any more."""
        size = self._size(item)
        with self._changed:
            while not self._given_up.is_set() and self._made and self._is_full():
                self._changed.wait()
            if self._given_up.is_set():
                return False
            self._made.append((item, size))
            self._bytes += size
            self._changed.notify_all()
            return True

    def _is_full(self) -> bool:
        return len(self._made) >= ITEMS_AHEAD or self._bytes >= BYTES_AHEAD
