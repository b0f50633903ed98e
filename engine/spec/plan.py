"""What one round will do: decided once, in `Planner`, before anything is derived from it."""

from dataclasses import dataclass
from typing import Literal

from engine.spec.history import Batch

Path = Literal["plain", "full", "compact"]
PATHS: tuple[Path, ...] = ("plain", "full", "compact")


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision that every rank carries out alike: four small integers."""

    path: Path
    """plain: no drafting; full: every draft is verified; compact: `budget` of them are."""

    budget: int | None
    """Draft tokens verified in the whole batch, anchors not counted; None unless compact."""

    requests: int
    """Slots for requests: a graph tier, or the batch itself."""

    tokens: int
    """Verify tokens after padding: a graph tier, or what is scheduled."""

    def to_wire(self) -> tuple[int, int, int, int]:
        """For a message; a budget of None is -1."""
        budget = -1 if self.budget is None else self.budget
        return PATHS.index(self.path), budget, self.requests, self.tokens

    @classmethod
    def from_wire(cls, values: tuple[int, int, int, int]) -> "Plan":
        """What `to_wire` gave."""
        path, budget, requests, tokens = values
        return cls(PATHS[path], None if budget < 0 else budget, requests, tokens)


@dataclass(frozen=True, slots=True)
class Decided:
    """A round's plan, and what is needed to learn from its result."""

    plan: Plan
    round: int
    batch: Batch
    predicted: float
    """Expected tokens; 0 if nothing was predicted."""

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.batch.rows)

    def budget(self, gamma: int) -> int:
        """Draft tokens verified."""
        budgets = {"plain": 0, "full": self.num_reqs * gamma, "compact": self.plan.budget or 0}
        return budgets[self.plan.path]
