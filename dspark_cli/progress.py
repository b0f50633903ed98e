"""What a person or a script sees while rows run: a bar, a log line, a small JSON file."""

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspark_cli.interrupt import Deadline
from dspark_cli.output import write_atomically
from dspark_cli.startup import Startup
from engine.telemetry import EngineStats

LOG_SECONDS = 10.0
FILE_SECONDS = 1.0
TICK_SECONDS = 0.25
WINDOW_SECONDS = 10.0
SLOW_SECONDS = 1.0


@dataclass(slots=True)
class Counts:
    """Output lines by state; owned by the job."""

    total: int | None = None
    """Lines to come in all, as far as known; None for stdin."""

    kept: int = 0
    """Done in an earlier run."""

    done: int = 0
    """Finished in this run."""

    failed: int = 0
    """Failed, in this run or kept from an earlier one."""

    in_flight: int = 0

    @property
    def settled(self) -> int:
        """Lines that need no more work."""
        return self.kept + self.done + self.failed

    @property
    def to_come(self) -> int | None:
        """Lines that nobody works on yet, at most, as far as known."""
        return None if self.total is None else self.total - self.settled - self.in_flight


class Rate:
    """Tokens a second over the last seconds and over the run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._points: deque[tuple[float, int]] = deque([(self._start, 0)])

    def update(self, tokens: int) -> float:
        """Record a total; the rate of the last seconds."""
        now = self._clock()
        self._points.append((now, tokens))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_SECONDS:
            self._points.popleft()
        then, before = self._points[0]
        return (tokens - before) / (now - then) if now > then else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start


def seconds_left(counts: Counts, tokens: int, rate: float) -> float | None:
    """ETA by tokens: rows differ in length, so rows a second would mislead.

    Args:
        counts: Lines by state.
        tokens: Output tokens of this run so far, of running rows too.
        rate: Tokens a second.

    Returns:
        Seconds, or None while there is too little to tell from.
    """
    if counts.total is None or counts.done == 0 or rate <= 0:
        return None
    # running rows are half done on average
    started = counts.done + 0.5 * counts.in_flight
    mean = tokens / started
    left = max(counts.total - counts.settled - 0.5 * counts.in_flight, 0.0)
    return left * mean / rate


class Progress:
    """Shows the run from a thread of its own, so that a long step does not freeze it.

    Args:
        counts: Lines by state.
        stats: The engine's counters.
        quiet: Show nothing.
        file: Rewritten every second with the state as JSON.
        tick: Called a few times a second from the thread.
        startup: Tells of the first token.
    """

    def __init__(
        self,
        counts: Counts,
        stats: EngineStats,
        *,
        quiet: bool = False,
        file: Path | None = None,
        tick: Callable[[], None] = lambda: None,
        startup: Startup | None = None,
    ) -> None:
        self._counts = counts
        self._stats = stats
        self._quiet = quiet
        self._file = file
        self._tick = tick
        self._startup = startup
        self._told: set[str] = set()
        self._rate = Rate()
        self._log = Deadline(LOG_SECONDS)
        self._write = Deadline(FILE_SECONDS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-progress", daemon=True)
        self._bar: Any = None
        self.phase = "run"

    def __enter__(self) -> Self:
        """Start the thread."""
        if not self._quiet and sys.stderr.isatty():
            self._bar = make_bar(self._counts.total, "rows", "rows")
        self._show()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it, and show the last state."""
        self._stop.set()
        self._thread.join()
        self.phase = "done" if error is None else "stopped"
        self._tell()
        if self._bar is not None:
            self._refresh_bar(self._rate.update(self._stats.output_tokens))
            self._bar.close()
        self._write_file(self._rate.update(self._stats.output_tokens))

    def snapshot(self, rate: float) -> dict[str, Any]:
        """The state as JSON."""
        stats, counts = self._stats, self._counts
        return {
            "phase": self.phase,
            **asdict(counts),
            "output_tokens": stats.output_tokens,
            "tokens_per_second": round(rate, 1),
            "acceptance_length": round(stats.acceptance_length, 3),
            "drafts_verified_per_request_round": round(stats.schedule.mean_budget, 3),
            "padding_share": round(stats.schedule.padding_share, 4),
            "rounds_by_path": dict(stats.schedule.rounds),
            "elapsed_seconds": round(self._rate.elapsed, 1),
            "seconds_left": _rounded(seconds_left(counts, stats.output_tokens, rate)),
            "updated_at": round(time.time(), 1),
        }

    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            self._tick()
            self._tell()
            self._show()

    def _tell(self) -> None:
        """Say what is said once."""
        startup = self._startup
        news = {
            "KV": None if startup is None else startup.memory,
            "first token": None if startup is None else startup.line(),
            "shortage": shortage(self._stats),
        }
        for name, text in news.items():
            if text is None or name in self._told or self._quiet:
                continue
            self._told.add(name)
            with suppress(OSError):
                if self._bar is not None:
                    self._bar.write(f"dspark: {text}", file=sys.stderr)
                else:
                    sys.stderr.write(f"dspark: {text}\n")
                    sys.stderr.flush()

    def _show(self) -> None:
        rate = self._rate.update(self._stats.output_tokens)
        with suppress(OSError):  # nobody reads stderr any more
            if self._bar is not None:
                self._refresh_bar(rate)
            elif not self._quiet and self._log.due():
                sys.stderr.write(f"dspark: {self.line(rate)}\n")
                sys.stderr.flush()
        if self._write.due():
            self._write_file(rate)

    def line(self, rate: float) -> str:
        """The state for a log."""
        total = "" if self._counts.total is None else f"/{self._counts.total}"
        return f"{self._counts.settled}{total} rows, {self._postfix(rate)}"

    def _postfix(self, rate: float) -> str:
        counts, stats = self._counts, self._stats
        parts = [f"{counts.in_flight} in flight", f"{rate:.0f} tok/s"]
        if stats.rounds:
            parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        if stats.schedule.budget:
            parts.append(f"{stats.schedule.mean_budget:.1f} drafts verified")
        if counts.failed:
            parts.append(f"{counts.failed} failed")
        left = seconds_left(counts, stats.output_tokens, rate)
        if left is not None:
            parts.append(f"{clock(left)} left")
        return ", ".join(parts)

    def _refresh_bar(self, rate: float) -> None:
        self._bar.total = self._counts.total
        self._bar.n = self._counts.settled
        self._bar.set_postfix_str(self._postfix(rate), refresh=True)

    def _write_file(self, rate: float) -> None:
        if self._file is not None:
            data = json.dumps(self.snapshot(rate)).encode() + b"\n"
            with suppress(OSError):  # progress is not worth a run
                write_atomically(self._file, data)


def shortage(stats: EngineStats) -> str | None:
    """What became of steps that did not fit into memory; None if all did."""
    if not stats.out_of_memory:
        return None
    return (
        f"out of memory: going on with at most {stats.max_num_seqs} requests at once and "
        f"{stats.max_num_batched_tokens} prompt tokens a step; outputs do not change"
    )


class LoadProgress:
    """Shows checkpoints being read: a bar on a terminal, else a line for each that took a while."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bars = not quiet and sys.stderr.isatty()
        self._bar: Any = None
        self._phase = ""
        self._began = self._latest = 0.0
        self._done = 0

    def __call__(self, phase: str, done: int, total: int) -> None:
        """As Engine's `on_progress`."""
        if self._quiet:
            return
        size = phase.startswith("load")
        if phase != self._phase:
            self.close()
            self._phase, self._began = phase, time.perf_counter()
            if self._bars:
                self._bar = make_bar(total, phase, "B" if size else "")
        self._done, self._latest = done if size else 0, time.perf_counter()
        if self._bar is not None:
            self._bar.total = total
            self._bar.n = done
            self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif self._done and (seconds := self._latest - self._began) >= SLOW_SECONDS:
            speed = self._done / seconds / 1e9
            sys.stderr.write(
                f"dspark: {self._phase}: {self._done / 1e9:.2f} GB in {seconds:.1f} s, "
                f"{speed:.2f} GB/s\n"
            )
        self._done = 0


def make_bar(total: int | None, name: str, unit: str) -> Any:
    """A tqdm bar on stderr."""
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    tqdm.monitor_interval = 0  # its own thread: ours refreshes already
    size = unit == "B"
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
    if size:
        form += " {rate_fmt}"
    if total is None:
        form = "{desc} {n_fmt}{postfix}"
    return tqdm(
        total=total,
        desc=name,
        unit=unit,
        unit_scale=size,
        bar_format=form,
        dynamic_ncols=True,
        leave=not size,
        file=sys.stderr,
    )


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
