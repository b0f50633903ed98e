"""Percentiles, latencies of a request, windows of a run; `evals.metrics` defines the words."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from engine.request import Completion
from evals.numbers import ratio, require, rounded


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution in short; the unit is that of the samples."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    least: float
    most: float

    def as_json(self, scale: float = 1.0) -> dict[str, Any]:
        """Values times `scale` (1000 for milliseconds); `count` as it is."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v if k == "count" else rounded(v * scale) for k, v in values.items()}


def percentiles(samples: Iterable[tuple[float, int]]) -> Percentiles | None:
    """Nearest-rank percentiles.

    Args:
        samples: (value, how often).

    Returns:
        None if there are no samples.
    """
    ranked = sorted((value, times) for value, times in samples if times > 0)
    count = sum(times for _, times in ranked)
    if not count:
        return None
    return Percentiles(
        count=count,
        mean=sum(value * times for value, times in ranked) / count,
        p50=_rank(ranked, math.ceil(0.50 * count)),
        p95=_rank(ranked, math.ceil(0.95 * count)),
        p99=_rank(ranked, math.ceil(0.99 * count)),
        least=ranked[0][0],
        most=ranked[-1][0],
    )


def _rank(ranked: Sequence[tuple[float, int]], rank: int) -> float:
    seen = 0
    for value, times in ranked:
        seen += times
        if seen >= rank:
            return value
    return ranked[-1][0]


def ttft(done: Completion) -> float | None:
    """Seconds from admission to the first token; None without times."""
    commits = done.timing.commits
    return commits[0][0] - done.timing.admitted if commits else None


def itl_samples(done: Completion) -> list[tuple[float, int]]:
    """(seconds a token, tokens) of each step but the first; they sum to t_last - t_0."""
    commits = done.timing.commits
    return [((now - then) / count, count) for (then, _), (now, count) in pairwise(commits) if count]


def request_speed(done: Completion) -> float | None:
    """Tokens a second of one request, its first step left out; None for a single step."""
    commits = done.timing.commits
    if len(commits) < 2 or commits[-1][0] <= commits[0][0]:
        return None
    return sum(count for _, count in commits[1:]) / (commits[-1][0] - commits[0][0])


@dataclass(frozen=True, slots=True)
class Latency:
    """What one user of the batch would have seen; each None if there was nothing to time."""

    ttft: Percentiles | None
    """Seconds, a sample a request."""

    itl: Percentiles | None
    """Seconds, a sample a token."""

    request_speed: Percentiles | None
    """Tokens a second, a sample a request."""

    def as_json(self) -> dict[str, Any]:
        """For `summary.json`: times in milliseconds."""
        return {
            "ttft_ms": None if self.ttft is None else self.ttft.as_json(1e3),
            "itl_ms": None if self.itl is None else self.itl.as_json(1e3),
            "tokens_per_second_per_request": (
                None if self.request_speed is None else self.request_speed.as_json()
            ),
        }


def latency(completions: Sequence[Completion]) -> Latency:
    """Latencies over some requests, which may come from several runs."""
    speeds = [request_speed(done) for done in completions]
    firsts = [ttft(done) for done in completions]
    return Latency(
        ttft=percentiles((value, 1) for value in firsts if value is not None),
        itl=percentiles(sample for done in completions for sample in itl_samples(done)),
        request_speed=percentiles((value, 1) for value in speeds if value is not None),
    )


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of wall time, in seconds of time.perf_counter."""

    name: str
    """`load`, `compile`, `run`, `steady`, ..."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def check_windows(windows: Sequence[Window], start: float, end: float) -> None:
    """Check that windows follow each other without gaps and make up [start, end].

    Raises:
        IdentityError: They do not.
    """
    edges = [start, *(w.end for w in windows)]
    for edge, window in zip(edges, windows, strict=False):
        require(window.start == edge, f"{window.name} does not begin where the one before ends")
        require(window.end >= window.start, f"{window.name} ends before it begins")
    require(edges[-1] == end, "the windows end before the run does")


def tokens_in(completions: Iterable[Completion], window: Window) -> int:
    """Output tokens that came in (start, end]."""
    return sum(
        count
        for done in completions
        for at, count in done.timing.commits
        if window.start < at <= window.end
    )


def speed(completions: Iterable[Completion], window: Window) -> float | None:
    """Output tokens a second in a window, all requests together; None if it has no length."""
    return ratio(tokens_in(completions, window), window.seconds)


def steady_window(
    completions: Sequence[Completion], max_num_seqs: int, share: float = 0.9
) -> Window | None:
    """From the first to the last moment with the batch nearly full; None if it never was.

    A request is in flight from its admission to its last token.

    Args:
        completions: One run's.
        max_num_seqs: Requests at once at most.
        share: How full counts as nearly full, of `max_num_seqs`.
    """
    changes = sorted(
        change
        for done in completions
        if done.timing.commits
        for change in ((done.timing.admitted, 1), (done.timing.commits[-1][0], -1))
    )
    enough, running = math.ceil(share * max_num_seqs), 0
    start = end = None
    for at, by in changes:
        if running >= enough and by < 0:
            end = at
        running += by
        if running >= enough and start is None:
            start = at
    return None if start is None or end is None else Window("steady", start, end)
