"""What is measured, defined once: acceptance, latency and speed, as pure functions of completions.

Everything is counted after a sequence was cut at its end: `Completion.rounds` and
`Completion.timing` describe kept tokens only. Times are seconds of one process's perf_counter.

Words, for one request that gave tokens in steps k = 0, 1, ..., n_k tokens at time t_k:

    round                a step that had drafts to check: `drafted` of them, `accepted` kept, and
                         `committed` = accepted + 1 bonus token, unless the end cut the bonus off
    acceptance length    committed / rounds, bonus included. Pooled: sums over all requests, so
                         long outputs weigh more. Per request: the mean of the requests' own ratios
    survival at i        rounds that kept draft position i (from 0) / all rounds
    among proposed at i  rounds that kept position i / rounds that proposed it
    conditional at i     rounds that kept position i / rounds that proposed it and kept all before
    TTFT                 t_0 - admitted: admission is when the request got its row, so time spent
                         waiting in the queue of an offline run is not in it
    ITL                  (t_k - t_(k-1)) / n_k for each of the n_k tokens of step k > 0: the gap
                         between steps shared by the tokens it brought, one sample a token
    tokens/s, request    tokens after the first step / (t_last - t_0)
    tokens/s, window     tokens with a time in (start, end] / (end - start), all requests together
    p50, p95, p99        nearest rank: the smallest value with at least that share of the samples
                         at or below it; never an interpolated value

Identities that hold for any input, checked in `acceptance` and `check_completion`:

    sum(histogram) = rounds;  sum(c * histogram[c]) = committed = accepted + bonus tokens
    acceptance length = bonus / rounds + sum of survival;  survival never rises with i
    output tokens = committed in rounds + one for each step without a draft (prefill is one)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.request import Completion, Round
from engine.telemetry import EngineStats
from evals.latency import (
    Latency,
    Percentiles,
    Window,
    check_windows,
    itl_samples,
    latency,
    percentiles,
    request_speed,
    speed,
    steady_window,
    tokens_in,
    ttft,
)
from evals.numbers import IdentityError, ratio, require, rounded

__all__ = [
    "Acceptance",
    "IdentityError",
    "Latency",
    "Percentiles",
    "Position",
    "Window",
    "acceptance",
    "check_completion",
    "check_counters",
    "check_windows",
    "itl_samples",
    "latency",
    "percentiles",
    "ratio",
    "request_json",
    "request_speed",
    "rounded",
    "speed",
    "steady_window",
    "tokens_in",
    "ttft",
]


@dataclass(frozen=True, slots=True)
class Position:
    """How one draft position fared."""

    position: int
    """From 0, the token right after the anchor."""

    accepted: int
    """Rounds that kept it."""

    proposed: int
    """Rounds that checked it."""

    reached: int
    """Rounds that checked it and kept every position before it."""

    rounds: int
    """All rounds with a draft."""

    @property
    def survival(self) -> float | None:
        """Accepted / rounds: the marginal rate; never rises with the position."""
        return ratio(self.accepted, self.rounds)

    @property
    def among_proposed(self) -> float | None:
        """Accepted / proposed: the same for rounds that had this position."""
        return ratio(self.accepted, self.proposed)

    @property
    def conditional(self) -> float | None:
        """Accepted / reached."""
        return ratio(self.accepted, self.reached)

    def as_json(self) -> dict[str, Any]:
        """Counts, and the three rates with the denominators beside them."""
        rates = {name: rounded(getattr(self, name)) for name in _RATES}
        return asdict(self) | rates


_RATES = ("survival", "among_proposed", "conditional")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What drafting gave, over some requests; see `acceptance`."""

    requests: int
    """Requests with at least one round."""

    rounds: int
    drafted: int
    accepted: int
    committed: int
    bonus: int
    """Rounds whose bonus token was kept."""

    undrafted_steps: int
    """Steps after a request's first that had nothing to check: no evidence about the drafter."""

    length_per_request: float | None
    """Mean over requests of committed / rounds."""

    length_interval: tuple[float, float] | None
    """95 % interval of the pooled length, requests taken as the sample (ratio estimator)."""

    histogram: tuple[int, ...]
    """Rounds by committed tokens, dense: index 0 to most drafted + 1."""

    positions: tuple[Position, ...]

    @property
    def length(self) -> float | None:
        """Acceptance length, pooled: committed / rounds, bonus included."""
        return ratio(self.committed, self.rounds)

    @property
    def rate(self) -> float | None:
        """Accepted / drafted; falls with a longer draft even where quality stays."""
        return ratio(self.accepted, self.drafted)

    def as_json(self) -> dict[str, Any] | None:
        """For `summary.json`; None without a round."""
        if not self.rounds:
            return None
        return {
            "counting": "committed tokens per round, bonus included, after the cut at the end",
            "acceptance_length": rounded(self.length),
            "acceptance_length_interval_95": [rounded(x) for x in self.length_interval or ()],
            "acceptance_length_per_request": rounded(self.length_per_request),
            "acceptance_rate": rounded(self.rate),
            "requests": self.requests,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "committed": self.committed,
            "bonus": self.bonus,
            "undrafted_steps": self.undrafted_steps,
            "histogram_of_committed": list(self.histogram),
            "by_position": [position.as_json() for position in self.positions],
        }


def acceptance(completions: Iterable[Completion]) -> Acceptance:
    """Count the rounds of some requests.

    Args:
        completions: Finished requests, drafted or plain.

    Raises:
        IdentityError: The rounds contradict themselves.
    """
    completions = list(completions)
    every = [done.rounds for done in completions]
    requests = [kept for each in every if (kept := [r for r in each if r.drafted > 0])]
    rounds = [r for kept in requests for r in kept]
    for r in rounds:
        _check_round(r)
    most = max((r.drafted for r in rounds), default=0)
    histogram = [0] * (most + 2)
    for r in rounds:
        histogram[r.committed] += 1
    sums = [(sum(r.committed for r in kept), len(kept)) for kept in requests]
    result = Acceptance(
        requests=len(requests),
        rounds=len(rounds),
        drafted=sum(r.drafted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        committed=sum(r.committed for r in rounds),
        bonus=sum(r.committed - r.accepted for r in rounds),
        undrafted_steps=sum(map(_num_steps, completions)) - len(rounds),
        length_per_request=ratio(sum(c / n for c, n in sums), len(sums)),
        length_interval=_ratio_interval(sums),
        histogram=tuple(histogram),
        positions=tuple(_position(rounds, at) for at in range(most)),
    )
    _check_acceptance(result)
    return result


def _num_steps(done: Completion) -> int:
    """Steps after the prefill; those without drafts are known where times are."""
    return max(len(done.timing.commits) - 1, len(done.rounds))


def _position(rounds: Sequence[Round], at: int) -> Position:
    return Position(
        position=at,
        accepted=sum(r.accepted > at for r in rounds),
        proposed=sum(r.drafted > at for r in rounds),
        reached=sum(r.drafted > at and r.accepted >= at for r in rounds),
        rounds=len(rounds),
    )


def _ratio_interval(sums: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """95 % interval of sum(committed) / sum(rounds), linearised; None below two requests."""
    n, rounds = len(sums), sum(r for _, r in sums)
    if n < 2:
        return None
    length = sum(c for c, _ in sums) / rounds
    spread = sum((c - length * r) ** 2 for c, r in sums)
    half = 1.959964 * math.sqrt(spread * n / (n - 1)) / rounds
    return length - half, length + half


def _check_round(r: Round) -> None:
    require(0 <= r.accepted <= r.drafted, f"a round kept {r.accepted} of {r.drafted} drafts")
    require(r.committed - r.accepted in (0, 1), f"a round committed {r.committed}: {r}")
    require(r.committed >= 1, f"a round committed nothing: {r}")


def _check_acceptance(a: Acceptance) -> None:
    at = [p.accepted for p in a.positions]
    require(sum(a.histogram) == a.rounds, "the histogram does not sum to the rounds")
    total = sum(c * n for c, n in enumerate(a.histogram))
    require(total == a.committed, "the histogram does not give the committed tokens")
    require(a.committed == a.accepted + a.bonus, "committed is not accepted plus bonus")
    require(sum(at) == a.accepted, "positions do not sum to the accepted drafts")
    require(sum(p.proposed for p in a.positions) == a.drafted, "nor to the drafted ones")
    require(at == sorted(at, reverse=True), f"survival rises with the position: {at}")


def check_completion(done: Completion) -> None:
    """Check one request's own numbers against each other.

    Raises:
        IdentityError: They do not add up.
    """
    output, steps = len(done.token_ids), len(done.timing.commits)
    committed = sum(r.committed for r in done.rounds)
    if not steps:  # stored without times
        require(committed <= output, f"{done.request.request_id}: more committed than output")
        return
    timed = sum(count for _, count in done.timing.commits)
    require(timed == output, f"{done.request.request_id}: {timed} timed of {output} tokens")
    plain = steps - len(done.rounds)
    require(
        output == committed + plain,
        f"{done.request.request_id}: {output} tokens, {committed} committed in rounds and {plain} "
        "steps without a draft",
    )


def check_counters(done: Sequence[Completion], before: EngineStats, after: EngineStats) -> None:
    """Check completions against the engine's own counters over the same run.

    Args:
        done: Every request of the run; none may have failed half way.
        before: A copy (`dataclasses.replace`) of the counters at its start.
        after: The counters at its end.

    Raises:
        IdentityError: They differ.
    """
    a = acceptance(done)
    ours = {
        "rounds": a.rounds,
        "drafted": a.drafted,
        "accepted": a.accepted,
        "committed": a.committed,
        "output_tokens": sum(len(d.token_ids) for d in done),
    }
    for name, count in ours.items():
        theirs = getattr(after, name) - getattr(before, name)
        require(count == theirs, f"{name}: {count} in the requests, {theirs} in the engine")


def request_json(done: Completion) -> dict[str, Any]:
    """The measured part of a line of `per_request.jsonl`; times in milliseconds."""
    a, first, itl = acceptance([done]), ttft(done), percentiles(itl_samples(done))
    return {
        "prompt_tokens": len(done.request.prompt_token_ids),
        "cached_prompt_tokens": done.num_cached_tokens,
        "output_tokens": len(done.token_ids),
        "finish_reason": done.finish_reason.value,
        "stop_reason": done.stop_reason,
        "rounds": a.rounds,
        "drafted": a.drafted,
        "accepted": a.accepted,
        "acceptance_length": rounded(a.length),
        "ttft_ms": None if first is None else rounded(first * 1e3),
        "itl_ms": None if itl is None else rounded(itl.mean * 1e3),
        "tokens_per_second": rounded(request_speed(done)),
    }
