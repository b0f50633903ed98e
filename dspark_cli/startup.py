"""From the command's start to its first token: how long it took, and on what."""

import os
import time
from pathlib import Path

from engine.telemetry import EngineStats


def process_started() -> float:
    """When this process began, on the clock of time.perf_counter.

    Where the system does not tell, now: the imports before this one are then left out.
    """
    now = time.perf_counter()
    try:
        # fields after the name, which may hold spaces; the 20th is the start in ticks since boot
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return now - max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return now


class Startup:
    """What went by before the first token.

    Args:
        stats: Of the engine, which is loaded by now.
        started: When the process began, on the clock of time.perf_counter.
    """

    def __init__(self, stats: EngineStats, started: float) -> None:
        self._stats = stats
        made = sum(stats.seconds.get(name, 0.0) for name in ("load", "warm-up", "capture"))
        self._before = max(time.perf_counter() - made - started, 0.0)

    @property
    def memory(self) -> str | None:
        """What the KV cache got of the device, and why; None where that was not measured."""
        return f"KV cache {self._stats.kv_account}" if self._stats.kv_account else None

    def line(self) -> str | None:
        """One line, once there was a token."""
        spent = self._stats.until_first_token
        if not spent:
            return None
        parts = {
            "imports and checks": self._before,
            "loading": spent["load"],
            "warm-up and capture": spent["warm-up"] + spent["capture"],
            "prompt to token": spent["rest"],
        }
        listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        return f"first token {sum(parts.values()):.1f} s after the start: {listed}"
