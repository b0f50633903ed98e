"""Time spent by phase: wall time on a CPU, device time between events on a CUDA device."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up phases of steps.

    Args:
        seconds: Totals by phase, added to in place.
        device: Where the phases run.
    """

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self.seconds = seconds
        self._on_device = device.type == "cuda"
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Of phases that were counted, to be used again."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done, or launched, inside."""
        if not self._on_device:
            begin = time.perf_counter()
            try:
                yield
            finally:
                self._add(name, time.perf_counter() - begin)
            return
        start, end = self._free.pop() if self._free else _events()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((name, start, end))

    def settle(self) -> None:
        """Count device phases that have ended; decides nothing, so it may look without waiting."""
        while self._open and self._open[0][2].query():
            name, start, end = self._open.popleft()
            self._add(name, start.elapsed_time(end) / 1e3)
            self._free.append((start, end))

    def busy(self) -> bool:
        """Has the device work left of the last phase? Decides nothing, so it may look."""
        return bool(self._open) and not self._open[-1][2].query()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Time the host spends on capturing a round."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add("capture", time.perf_counter() - begin)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the host spends on waiting for the device."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self._on_device:
                self._add("wait", time.perf_counter() - begin)

    def occupied(self) -> float:
        """Seconds so far in which the host computed or waited, rather than prepared."""
        names = ("wait", "capture") if self._on_device else ("prefill", "draft", "verify")
        return sum(self.seconds.get(name, 0.0) for name in names)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
