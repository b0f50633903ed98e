"""A decision that stands for some rounds.

With many requests the best budget changes little from one round to the next, and with a small model
finding it takes the host a tenth of the round. What stands is older than it might be, so it is as
sound.
"""

from collections.abc import Set
from dataclasses import dataclass, replace

from engine.spec.plan import Path, Plan

MANY = 32
"""Requests from which a decision stands: what one of them does hardly counts."""

LASTS = 4
"""Rounds that it stands for."""

_ALIKE = 8
"""A batch is like another if one in so many requests at most has come or gone."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What was decided, and for whom."""

    plan: Plan
    round: int
    num_reqs: int
    exact: bool
    """Does the plan suit no other number of requests?"""

    predicted: float

    def again(
        self, now: int, num_reqs: int, gamma: int, captured: Set[tuple[Path, int, int]] | None
    ) -> tuple[Plan, float] | None:
        """The plan of round `now` and the tokens expected of it, if it still stands.

        Args:
            now: The round.
            num_reqs: R of its batch.
            gamma: Drafts of a request.
            captured: Rounds that can be replayed; None: rounds are not.
        """
        plan, change = self.plan, abs(num_reqs - self.num_reqs)
        young = 0 < now - self.round < LASTS
        alike = change == 0 or (not self.exact and change <= self.num_reqs // _ALIKE)
        if num_reqs < MANY or not young or not alike or num_reqs > plan.requests:
            return None
        if captured is not None and (plan.path, plan.requests, plan.tokens) not in captured:
            return None
        if plan.budget is not None and change:
            # further drafts fill the tier
            plan = replace(plan, budget=min(plan.tokens - num_reqs, num_reqs * gamma))
        return plan, self.predicted * num_reqs / self.num_reqs
