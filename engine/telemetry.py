"""Counters and timers of one engine; host data only."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

CALIBRATION_BINS = 10


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of the whole batch, for whoever follows them. Times as time.perf_counter's."""

    number: int
    path: str
    """plain, full or compact."""

    requests: int
    slots: int
    """Requests after padding."""

    budget: int
    """Draft tokens verified."""

    tokens: int
    """Target tokens after padding."""

    predicted: float
    """Expected tokens; 0 if nothing was predicted."""

    committed: int
    """Tokens of requests that were not over, before cuts at ends."""

    begin: float
    """The host began to decide."""

    launched: float
    """The device had been given everything."""

    end: float
    """The result was there."""


@dataclass(slots=True)
class ScheduleStats:
    """What was planned for rounds, and what came of it. Sums over rounds of the whole batch."""

    rounds: dict[str, int] = field(default_factory=lambda: {"plain": 0, "full": 0, "compact": 0})
    """Rounds by path."""

    eager: int = 0
    """Rounds that were not replayed from a captured graph; all of them on a CPU."""

    captures: int = 0
    """Graphs captured."""

    requests: int = 0
    """Requests in rounds: sums up to request-rounds, plain ones included."""

    budget: int = 0
    """Draft tokens scheduled for verification."""

    scheduled: int = 0
    """Target tokens asked for: requests and budget."""

    tokens: int = 0
    """Target tokens computed: `scheduled`, and the padding up to graph tiers."""

    predicted: float = 0.0
    """Expected tokens, of requests that were not over, in rounds that predicted any."""

    realised: int = 0
    """Tokens those committed, before cuts at ends."""

    plans_told: int = 0
    """Messages from rank 0 with a plan."""

    plan_seconds: float = 0.0
    """What they took rank 0's host; on other ranks, waiting for rank 0 to decide is in it."""

    plan_exposed_seconds: float = 0.0
    """Of that, messages at whose end the device had nothing left to do; all of it on a CPU."""

    audits: int = 0
    """Comparisons of what ranks are about to do."""

    audit_seconds: float = 0.0
    """What they took the host, waiting for the slowest rank included."""

    foreseen_at: list[float] = field(default_factory=lambda: [0.0] * CALIBRATION_BINS)
    """Survivals of verified drafts, summed by tenth of survival."""

    checked_at: list[int] = field(default_factory=lambda: [0] * CALIBRATION_BINS)
    """How many those were."""

    accepted_at: list[int] = field(default_factory=lambda: [0] * CALIBRATION_BINS)
    """How many of them stayed."""

    @property
    def padding_share(self) -> float:
        """Of the target tokens computed."""
        return 1.0 - self.scheduled / self.tokens if self.tokens else 0.0

    @property
    def mean_budget(self) -> float:
        """Draft tokens verified per request and round, plain rounds included."""
        return self.budget / self.requests if self.requests else 0.0

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error of survivals; None before the first verified draft."""
        count = sum(self.checked_at)
        if not count:
            return None
        both = zip(self.foreseen_at, self.accepted_at, strict=True)
        return sum(abs(foreseen - accepted) for foreseen, accepted in both) / count


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made. Tokens are counted after cutting at the sequence end."""

    prompt_tokens: int = 0
    """Prompt tokens admitted, cached ones included."""

    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    output_tokens: int = 0
    """Tokens kept, of finished and running requests."""

    rounds: int = 0
    """Request-rounds with drafts checked: at most one per request per round."""

    drafted: int = 0
    """Draft tokens the target checked."""

    accepted: int = 0
    """Draft tokens kept."""

    committed: int = 0
    """Tokens kept in those rounds, bonus tokens included."""

    drafted_at: list[int] = field(default_factory=list)
    """Per draft position: how often the target checked it."""

    accepted_at: list[int] = field(default_factory=list)
    """Per draft position: how often it was kept."""

    preemptions: int = 0
    out_of_memory: int = 0
    """Steps that did not fit; each made those after it smaller."""

    max_num_seqs: int = 0
    """Requests at once, as it is now."""

    max_num_batched_tokens: int = 0
    """Prompt tokens a step, as it is now."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_account: str = ""
    """How KV memory came about, where it was measured."""

    schedule: ScheduleStats = field(default_factory=ScheduleStats)
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: load, warm-up, capture, prefill, draft, verify, wait, host."""

    until_first_token: dict[str, float] = field(default_factory=dict)
    """Wall time from the engine's beginning to its first output token: load, warm-up, capture, and
    the rest. Empty before that token."""

    def count_rounds(self, rounds: Iterable[tuple[int, int, int]]) -> None:
        """Count request-rounds, after the cut. Many are alike: each kind is counted once.

        Args:
            rounds: Drafts checked, accepted and tokens committed of each.
        """
        for (drafted, accepted, committed), times in Counter(rounds).items():
            self.rounds += times
            self.drafted += drafted * times
            self.accepted += accepted * times
            self.committed += committed * times
            for k in range(drafted):
                self.drafted_at[k] += times
            for k in range(min(drafted, accepted)):
                self.accepted_at[k] += times

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per request-round, bonus included; 0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for another process or a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EngineStats":
        """What `to_json` gave, back."""
        return cls(**{**values, "schedule": ScheduleStats(**values["schedule"])})

    def become(self, other: "EngineStats") -> None:
        """Take over all of another's values: for those who hold on to this object."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))


def merge(many: Iterable[EngineStats]) -> EngineStats:
    """Totals over several engines: sums, of `seconds` too.

    What describes an engine's memory and start is the first one's that says it; prompt tokens a
    step are the largest.
    """
    total = EngineStats()
    for stats in many:
        for each in fields(EngineStats):
            mine, theirs = getattr(total, each.name), getattr(stats, each.name)
            setattr(total, each.name, _SPECIAL.get(each.name, _sum)(mine, theirs))
    return total


def _sum(mine: Any, theirs: Any) -> Any:
    """Numbers, lists and dictionaries of them: a list or dictionary may lack what the other has."""
    if isinstance(mine, dict):
        return {k: mine.get(k, 0) + theirs.get(k, 0) for k in {**mine, **theirs}}
    if isinstance(mine, list):
        length = max(len(mine), len(theirs))
        both = (x + [0] * (length - len(x)) for x in (mine, theirs))
        return [a + b for a, b in zip(*both, strict=True)]
    if isinstance(mine, ScheduleStats):
        names = [each.name for each in fields(ScheduleStats)]
        return ScheduleStats(**{n: _sum(getattr(mine, n), getattr(theirs, n)) for n in names})
    return mine + theirs


def _first(mine: Any, theirs: Any) -> Any:
    return mine or theirs


_SPECIAL: dict[str, Callable[[Any, Any], Any]] = {
    "max_num_batched_tokens": max,
    "kv_account": _first,
    "until_first_token": _first,
}
