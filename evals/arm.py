"""One pass over the rows of an evaluation: drafted, plain, or texts that were there before."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.request import Completion
from evals.metrics import Acceptance, acceptance, check_completion, latency
from evals.numbers import ratio, rounded

DRAFTED, PLAIN, RESCORED = "drafted", "plain", "rescored"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What one pass gave."""

    name: str
    """`drafted`, `plain` or `rescored`."""

    done: Mapping[str, Completion] = field(default_factory=dict)
    """By request id, also those of an earlier run that was resumed."""

    failed: Mapping[str, str] = field(default_factory=dict)
    """Request id -> why it has no output."""

    seconds: float = 0.0
    """Wall time of this process's part, loading left out."""

    fresh_tokens: int = 0
    """Output tokens of this process's part."""

    resumed: int = 0
    """Requests whose output an earlier run had made."""

    @property
    def acceptance(self) -> Acceptance:
        """Over all requests."""
        return acceptance(self.done.values())

    @property
    def speed(self) -> float | None:
        """Output tokens a second of this process's part; None if it made none."""
        return ratio(self.fresh_tokens, self.seconds) if self.fresh_tokens else None

    def check(self) -> None:
        """Hold every request's numbers against each other.

        Raises:
            IdentityError: They do not add up.
        """
        for completion in self.done.values():
            check_completion(completion)

    def as_json(self) -> dict[str, Any]:
        """Speeds and acceptance, for `summary.json`."""
        tokens = sum(len(c.token_ids) for c in self.done.values())
        return {
            "seconds": rounded(self.seconds),
            "resumed_requests": self.resumed,
            "output_tokens": tokens,
            "output_tokens_per_request": rounded(ratio(tokens, len(self.done))),
            "output_tokens_per_second": rounded(self.speed),
            "latency": latency(list(self.done.values())).as_json(),
            "acceptance": self.acceptance.as_json(),
        }
