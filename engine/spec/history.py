"""What rounds brought, and what that says of the drafts of the next one.

Nothing that a round drafts may have a say in how much of it is verified: survivals count two rounds
later.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LAG = 2
"""Rounds between a draft and the first budget that may depend on it."""

_DECAY, _PRIOR = 0.98, 16.0
"""Memory of predicted and accepted drafts: per round, and drafts assumed to be as predicted."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Who decodes this round. R requests."""

    rows: Ints  # [R]
    generations: Ints  # [R], which binding of the row this is; never repeats
    kv_tokens: int  # of all of them together
    soon: int = 0
    """Requests there will be within a few rounds, those that wait for their prompts included."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round brought. R requests."""

    rows: Ints  # [R]
    generations: Ints  # [R]
    verify_lens: Ints  # [R]
    committed: Ints  # [R]; 0: nothing to learn from
    survival: Floats | None  # [R, G]; None of a plain round

    def looked_at(self, gamma: int) -> tuple[Bools, Bools]:
        """[R, G] which drafts the target looked at, and which of those it kept."""
        column, counts = np.arange(gamma), self.committed[:, None]
        looked = (column < self.verify_lens[:, None] - 1) & (counts > 0)
        return looked, looked & (column < counts - 1)


class History:
    """Survivals by row, and of all requests lately.

    Args:
        num_rows: Rows that requests may have.
        gamma: G.
        per_request: False: there is no confidence head, survivals are the acceptance rates of all
            requests so far.
    """

    def __init__(self, num_rows: int, gamma: int, *, per_request: bool) -> None:
        """Nothing has happened yet."""
        self._gamma = gamma
        self._per_request = per_request
        self._outcomes: deque[tuple[int, Outcome]] = deque()
        self._survival = np.ones((num_rows, gamma))
        self._generation = np.full(num_rows, -1, dtype=np.int64)
        # of all requests lately: survivals and how many, then drafts foreseen and accepted
        self._survived, self._drafted_for = np.full(gamma, _PRIOR), _PRIOR
        self._foreseen = np.full(gamma, _PRIOR)
        self._accepted = np.full(gamma, _PRIOR)

    def observe(self, round_: int, outcome: Outcome) -> None:
        """Take in what round `round_` brought; plans before `round_ + LAG` do not see it."""
        self._outcomes.append((round_, outcome))

    def settle(self, now: int) -> None:
        """Learn from rounds that the plan of round `now` may depend on."""
        while self._outcomes and self._outcomes[0][0] <= now - LAG:
            _, outcome = self._outcomes.popleft()
            if outcome.survival is not None:
                self._survival[outcome.rows] = outcome.survival
                self._generation[outcome.rows] = outcome.generations
                self._note_survival(outcome.survival[outcome.committed > 0])
                self._learn(outcome, outcome.survival)
            elif not self._per_request:
                self._learn(outcome, np.ones((len(outcome.rows), self._gamma)))

    def _note_survival(self, survival: Floats) -> None:
        """Of rounds that counted: a void one is made again, with the same drafts."""
        kept, new = _DECAY, (1 - _DECAY) * _PRIOR
        self._survived = self._survived * kept + new + survival.sum(axis=0)
        self._drafted_for = self._drafted_for * kept + new + len(survival)

    def _learn(self, outcome: Outcome, survival: Floats) -> None:
        """Compare survivals with what was accepted, where the target had a look."""
        looked, kept = outcome.looked_at(self._gamma)
        self._foreseen = self._foreseen * _DECAY + (1 - _DECAY) * _PRIOR
        self._accepted = self._accepted * _DECAY + (1 - _DECAY) * _PRIOR
        self._foreseen += (survival * looked).sum(axis=0)
        self._accepted += kept.sum(axis=0)

    def survival(self, batch: Batch) -> Floats:
        """[R, G] what is expected of each request's drafts.

        A newcomer counts as others did lately, and as 1 where there were none.
        """
        scale = self._accepted / self._foreseen
        if not self._per_request:
            rates = np.minimum.accumulate(np.minimum(scale, 1.0))
            return np.tile(rates, (len(batch.rows), 1))
        fresh = self._generation[batch.rows] == batch.generations
        others = self._survived / self._drafted_for
        known = np.where(fresh[:, None], self._survival[batch.rows], others)
        return np.minimum.accumulate(np.minimum(known * scale, 1.0), axis=1)
