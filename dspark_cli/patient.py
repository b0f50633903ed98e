"""Pipes and terminals read by a thread that may be told to stop: no read waits for ever.

A thread left inside a read of stdin would keep the interpreter from ending.
"""

import io
import os
import select
import stat
from pathlib import Path
from threading import Event
from typing import Any

STEP_SECONDS = 0.1
"""How long a reader takes to notice that it is to stop, at most."""


class Patient(io.RawIOBase):
    """A raw stream that ends when it is given up, whether or not more would come.

    Args:
        raw: Reads from a file descriptor; stays open.
        given_up: Set by another thread.
    """

    def __init__(self, raw: Any, given_up: Event) -> None:
        self._raw = raw
        self._given_up = given_up
        self._poll = select.poll()
        self._poll.register(raw.fileno(), select.POLLIN)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """As RawIOBase; 0 once it was given up."""
        while not self._given_up.is_set():
            if not self._poll.poll(STEP_SECONDS * 1000):
                continue
            count = self._raw.readinto(buffer)
            if count is not None:  # None: there is nothing after all
                return int(count)
        return 0


def patient(raw: Any, given_up: Event) -> io.BufferedReader:
    """A stream of `raw` that can be given up."""
    return io.BufferedReader(Patient(raw, given_up))


def open_pipe(path: Path) -> io.FileIO:
    """A named pipe, without waiting for somebody to write to it.

    Args:
        path: Anything that is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        is_pipe = stat.S_ISFIFO(os.stat(name).st_mode)
        return os.open(name, flags | (os.O_NONBLOCK if is_pipe else 0))

    return io.FileIO(str(path), "rb", opener=opener)
