"""Throughput of one loaded engine, drafted and plain, at several batch sizes.

A *pass* decodes a list of requests once, in one mode, with at most `max_num_seqs` at a time. A
*pair* is one drafted and one plain pass over the same requests, run one after the other; pairs
alternate in order (drafted, plain, plain, drafted), so that a machine that speeds up or slows down
favours neither. A *point* is all pairs at one batch size. Every size gets its first pair before
any gets its second, for the same reason; all are warmed up before, which is not counted.

Every pass is checked while it runs: requests against the engine's counters, tokens against rounds,
windows and phases against wall time (`evals.metrics`, `evals.latency`). A number that does not add
up ends the run.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine.errors import DSparkError
from engine.request import Completion, Request, RequestFailure
from engine.telemetry import EngineStats
from evals.latency import Window, check_windows, steady_window, tokens_in
from evals.metrics import check_completion, check_counters
from evals.numbers import ratio, require
from evals.timeline import Timeline

PHASES = ("draft", "verify", "prefill", "host")
"""The engine's own timers; plain steps count as verify. The rest of a pass is `outside`."""

_CLOCK_SLACK = 1e-3
"""Seconds by which phases may exceed wall time: their timers are read one after the other."""


class BenchEngine(Protocol):
    """What measuring needs of an engine."""

    @property
    def stats(self) -> EngineStats:
        """Counters and timers."""
        ...

    def run(
        self, requests: Iterable[Request], *, speculate: bool, max_num_seqs: int | None
    ) -> Iterator[Completion | RequestFailure]:
        """Complete requests."""
        ...


@dataclass(frozen=True, slots=True)
class Pass:
    """One mode over one list of requests."""

    speculate: bool
    max_num_seqs: int
    start: float
    end: float
    """Clock times around the whole pass."""

    seconds: dict[str, float]
    """Wall time by phase; sums to `end - start`."""

    done: tuple[Completion, ...]
    """In the order of the requests."""

    @property
    def whole(self) -> Window:
        """All of it, ramp and tail included."""
        return Window("run", self.start, self.end)

    @property
    def steady(self) -> Window | None:
        """While the batch was at least 90 % full; None if it never was."""
        return steady_window(self.done, self.max_num_seqs)

    @property
    def windows(self) -> tuple[Window, ...]:
        """Ramp, steady and tail, in order; only `run` if it was never steady."""
        steady = self.steady
        if steady is None:
            return (self.whole,)
        return (
            Window("ramp", self.start, steady.start),
            steady,
            Window("tail", steady.end, self.end),
        )

    @property
    def output_tokens(self) -> int:
        """Tokens of all requests, first ones included."""
        return sum(len(done.token_ids) for done in self.done)

    @property
    def speed(self) -> float:
        """Output tokens a second over the whole pass."""
        return self.output_tokens / (self.end - self.start)

    @property
    def mean_in_flight(self) -> float:
        """Requests in flight on average: the sum of their times from admission to end / wall."""
        busy = sum(done.timing.commits[-1][0] - done.timing.admitted for done in self.done)
        return busy / (self.end - self.start)

    def check(self) -> None:
        """Check the pass against itself.

        Raises:
            IdentityError: Something does not add up.
        """
        for done in self.done:
            check_completion(done)
        windows = self.windows
        check_windows(windows, self.start, self.end)
        inside = sum(tokens_in(self.done, window) for window in windows)
        require(inside == self.output_tokens, f"{inside} of {self.output_tokens} tokens in windows")
        wall, spent = self.end - self.start, sum(self.seconds.values())
        require(math.isclose(spent, wall, abs_tol=1e-6), f"phases {spent} s, wall {wall} s")
        outside = self.seconds["outside"]
        require(outside > -_CLOCK_SLACK, f"phases exceed wall time by {-outside} s")
        firsts, drafted = len(self.done), sum(r.committed for d in self.done for r in d.rounds)
        single = sum(len(d.timing.commits) - 1 - len(d.rounds) for d in self.done)
        require(
            drafted + single == self.output_tokens - firsts,
            f"committed {drafted} + {single} in steps without a draft is not output "
            f"{self.output_tokens} minus first tokens {firsts}",
        )
        require(self.speculate or not drafted, "a plain pass committed drafts")


def run_pass(
    engine: BenchEngine,
    requests: Sequence[Request],
    *,
    speculate: bool,
    max_num_seqs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Pass:
    """Decode `requests` once, and check what was counted.

    Args:
        engine: Loaded.
        requests: All must complete.
        speculate: Draft, or decode plainly.
        max_num_seqs: Requests at once.
        clock: The one completions are timed with.

    Raises:
        DSparkError: A request failed.
        IdentityError: The numbers do not add up.
    """
    before = replace(engine.stats, seconds=dict(engine.stats.seconds))
    done: dict[str, Completion] = {}
    start = clock()
    for result in engine.run(iter(requests), speculate=speculate, max_num_seqs=max_num_seqs):
        if isinstance(result, RequestFailure):
            raise DSparkError(
                f"request {result.request.request_id} failed: {result.message}",
                "a benchmark needs requests that all complete: fix or leave out the row",
            )
        done[result.request.request_id] = result
    end = clock()
    seconds = {
        name: engine.stats.seconds.get(name, 0.0) - before.seconds.get(name, 0.0) for name in PHASES
    }
    seconds["outside"] = (end - start) - sum(seconds.values())
    ordered = tuple(done[request.request_id] for request in requests)
    made = Pass(speculate, max_num_seqs, start, end, seconds, ordered)
    made.check()
    check_counters(ordered, before, engine.stats)
    return made


@dataclass(frozen=True, slots=True)
class Pair:
    """A drafted and a plain pass over the same requests."""

    drafted: Pass
    plain: Pass

    @property
    def speedup(self) -> float:
        """Output tokens a second, drafted over plain, whole passes."""
        return self.drafted.speed / self.plain.speed

    @property
    def equal_outputs(self) -> int:
        """Requests with the same tokens in both."""
        both = zip(self.drafted.done, self.plain.done, strict=True)
        return sum(a.token_ids == b.token_ids for a, b in both)


@dataclass(frozen=True, slots=True)
class Spread:
    """A ratio over pairs."""

    mean: float
    """Geometric."""

    least: float
    most: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value > 0."""
        logs = [math.log(value) for value in values]
        return cls(math.exp(sum(logs) / len(logs)), min(values), max(values), tuple(values))


@dataclass(frozen=True, slots=True)
class Point:
    """All passes at one batch size."""

    max_num_seqs: int
    requests: int
    pairs: tuple[Pair, ...]
    """Empty without a drafter."""

    plain_only: tuple[Pass, ...] = ()

    @property
    def drafted(self) -> tuple[Pass, ...]:
        """Its drafted passes."""
        return tuple(pair.drafted for pair in self.pairs)

    @property
    def plain(self) -> tuple[Pass, ...]:
        """Its plain passes."""
        return tuple(pair.plain for pair in self.pairs) or self.plain_only

    @property
    def speedup(self) -> Spread | None:
        """Drafted over plain; None without a drafter."""
        return Spread.of([pair.speedup for pair in self.pairs]) if self.pairs else None


def speed_of(passes: Sequence[Pass]) -> float:
    """Output tokens a second over several passes together."""
    return sum(p.output_tokens for p in passes) / sum(p.end - p.start for p in passes)


def steady_speed_of(passes: Sequence[Pass]) -> float | None:
    """The same in their steady windows; None if any has none."""
    windows = [(p, w) for p in passes if (w := p.steady) is not None]
    if len(windows) < len(passes):
        return None
    return ratio(sum(tokens_in(p.done, w) for p, w in windows), sum(w.seconds for _, w in windows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure."""

    max_num_seqs: tuple[int, ...]
    """Batch sizes, rising."""

    pairs: int = 2
    warmup_tokens: int = 16
    """Output tokens of a request at most while warming up."""

    drafted: bool = True
    """Is there a drafter?"""

    num_prompts: int | None = None
    """Requests at every point; None: 4 times the batch size, at least 8."""

    def requests_at(self, width: int, there: int) -> int:
        """How many of `there` requests a point decodes."""
        return min(self.num_prompts or max(8, 4 * width), there)


def measure(
    engine: BenchEngine,
    requests: Sequence[Request],
    plan: Plan,
    timeline: Timeline,
    say: Callable[[str], None] = lambda _text: None,
) -> list[Point]:
    """Run all points.

    Args:
        engine: Loaded with room for the largest batch.
        requests: The first ones are used at every point; ids must differ.
        plan: What to measure.
        timeline: Gets the windows `warm-up`, `drafted`, `plain` and `between`.
        say: Told before each pass what it is.
    """
    chosen = {
        width: requests[: plan.requests_at(width, len(requests))] for width in plan.max_num_seqs
    }
    _warm_up(engine, requests, plan)
    timeline.lap("warm-up")
    passes: dict[int, list[Pass]] = {width: [] for width in chosen}
    for width, speculate in _order(plan):
        mode = "drafted" if speculate else "plain"
        say(f"{width} at once, {mode}, {len(chosen[width])} requests")
        made = run_pass(
            engine, chosen[width], speculate=speculate, max_num_seqs=width, clock=timeline.clock
        )
        timeline.lap("between", made.start)
        timeline.lap(mode, made.end)
        passes[width].append(made)
    timeline.lap("between")
    return [_point(width, len(chosen[width]), made) for width, made in passes.items()]


def _order(plan: Plan) -> Iterator[tuple[int, bool]]:
    """(batch size, drafted?) of every pass.

    Sizes go up and down in turn, one pair of each a time, and modes ABBA, A being drafted.
    """
    for n in range(plan.pairs):
        modes = ((True, False), (False, True))[n % 2] if plan.drafted else (False,)
        for width in plan.max_num_seqs[:: -1 if n % 2 else 1]:
            for mode in modes:
                yield width, mode


def _point(width: int, requests: int, passes: Sequence[Pass]) -> Point:
    if not any(p.speculate for p in passes):
        return Point(width, requests, (), tuple(passes))
    pairs = []
    for first, second in zip(passes[::2], passes[1::2], strict=True):
        drafted, plain = (first, second) if first.speculate else (second, first)
        pairs.append(Pair(drafted, plain))
    return Point(width, requests, tuple(pairs))


def _warm_up(engine: BenchEngine, requests: Sequence[Request], plan: Plan) -> None:
    """Both modes at every size that a pass may shrink to: allocation, compilation and capture.

    Sizes rise in doublings: a pass whose batch shrinks at its end then finds graphs that fit.
    """
    most = plan.max_num_seqs[-1]
    doublings = {1 << n for n in range(most.bit_length())}
    for size in sorted({*doublings, *plan.max_num_seqs}):
        few = []
        for request in requests[:size]:
            tokens = min(request.params.max_tokens, plan.warmup_tokens)
            params = replace(request.params, max_tokens=tokens)
            few.append(replace(request, params=params))
        for speculate in (True, False) if plan.drafted else (False,):
            for _ in engine.run(iter(few), speculate=speculate, max_num_seqs=size):
                pass


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where drafting stops paying."""

    verdict: str
    """A sentence."""

    batch: float | None
    """Batch size at which the speed-up passes through 1, interpolated in log2; None if it does
    not within the measured points."""


def crossover(points: Sequence[Point]) -> Crossover:
    """Find the batch size from which on drafting is slower than plain decoding.

    Args:
        points: In rising order of batch size.
    """
    found = [(p.max_num_seqs, p.speedup.mean) for p in points if p.speedup is not None]
    if not found:
        return Crossover("no drafter: nothing to compare", None)
    sizes = f"{found[0][0]} to {found[-1][0]}" if len(found) > 1 else str(found[0][0])
    if found[-1][1] >= 1.0:
        low = [str(size) for size, gain in found if gain < 1.0]
        but = f", but not at {', '.join(low)}" if low else ""
        return Crossover(f"drafting pays at the measured batch sizes ({sizes}){but}", None)
    above = [n for n, (_, gain) in enumerate(found) if gain >= 1.0]
    if not above:
        return Crossover(f"drafting is slower at every measured batch size ({sizes})", None)
    (left, high), (right, low_gain) = found[above[-1]], found[above[-1] + 1]
    share = math.log(high) / (math.log(high) - math.log(low_gain))
    batch = 2 ** (math.log2(left) + share * (math.log2(right) - math.log2(left)))
    return Crossover(
        f"drafting stops paying between {left} and {right} requests at once (about {batch:.1f})",
        batch,
    )
