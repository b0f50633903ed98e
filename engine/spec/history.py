"""What rounds brought, and what that says of the drafts of the next one.

Nothing that a round drafts may have a say in how much of it is verified: survivals count two rounds
later, or more. What several rounds brought is taken in at once: with many requests and a small
model, the host has little more than a millisecond for a round.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.spec.budget import check_survival
from engine.telemetry import CALIBRATION_BINS as BINS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LAG = 2
"""Rounds between a draft and the first budget that may depend on it."""

_DECAY, _PRIOR = 0.98, 16.0
"""Memory of predicted and accepted drafts: per round, and drafts assumed to be as predicted."""

_PRIOR_TENTH = 4.0
"""The same in each tenth of survival."""

_MIDDLES = (np.arange(BINS) + 0.5) / BINS


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
        # without confidences: drafts looked at lately, by position, and those accepted
        self._looked = np.full(gamma, _PRIOR)
        self._accepted = np.full(gamma, _PRIOR)
        # with them: of which tenth drafts were lately, by position
        self._drafted = np.zeros((gamma, BINS))
        # and of those looked at, by tenth: the sum of survivals, how many they are, how many stayed
        self._prior = _PRIOR_TENTH * np.array([_MIDDLES, np.ones(BINS), _MIDDLES])
        self._by_tenth = self._prior.copy()
        self._reliability = np.zeros((3, BINS))

    def observe(self, round_: int, outcome: Outcome) -> None:
        """Take in what round `round_` brought; plans before `round_ + LAG` do not see it."""
        self._outcomes.append((round_, outcome))

    @property
    def num_waiting(self) -> int:
        """Rounds whose outcome has not been learned from."""
        return len(self._outcomes)

    def settle(self, now: int) -> None:
        """Learn from rounds that the plan of round `now` may depend on."""
        due = list[Outcome]()
        while self._outcomes and self._outcomes[0][0] <= now - LAG:
            due.append(self._outcomes.popleft()[1])
        drafted = [outcome for outcome in due if outcome.survival is not None]
        for outcome in drafted:
            self._survival[outcome.rows] = outcome.survival
            self._generation[outcome.rows] = outcome.generations
        if learned := drafted if self._per_request else due:
            self._learn(learned)

    def _learn(self, outcomes: list[Outcome]) -> None:
        """Compare what was foreseen with what was accepted, where the target had a look."""
        sizes = [len(o.rows) for o in outcomes]
        fading = _DECAY ** np.arange(len(outcomes) - 1, -1, -1)
        weight = np.repeat(fading, sizes)
        memory = _DECAY ** len(outcomes)
        committed = _joined([o.committed for o in outcomes])
        looked, kept = self._looked_at(_joined([o.verify_lens for o in outcomes]), committed)
        if not self._per_request:
            prior = (1.0 - memory) * _PRIOR
            self._looked = self._looked * memory + prior + weight @ looked
            self._accepted = self._accepted * memory + prior + weight @ kept
            return
        survival = _joined([o.survival for o in outcomes])
        check_survival(survival)
        tenth = np.minimum((survival * BINS).astype(np.int64), BINS - 1)
        # a void round is made again, with the same drafts
        counted = weight * (committed > 0)
        at = tenth + np.arange(self._gamma) * BINS
        weights = np.broadcast_to(counted[:, None], at.shape).ravel()
        drafted = np.bincount(at.ravel(), weights, self._gamma * BINS)
        self._drafted = self._drafted * memory + drafted.reshape(self._gamma, BINS)
        of = np.repeat(np.arange(len(outcomes)), np.array(sizes) * self._gamma)[looked.ravel()]
        at = tenth[looked] + of * BINS
        tenths = _by_tenth(at, survival[looked], kept[looked], len(outcomes))
        self._reliability += tenths.sum(axis=1)
        self._by_tenth = self._by_tenth * memory + (1.0 - memory) * self._prior + fading @ tenths

    def _looked_at(self, verify_lens: Ints, committed: Ints) -> tuple[Bools, Bools]:
        """[R, G] which drafts the target looked at, and which of those it kept; of [R] each."""
        column, counts = np.arange(self._gamma), committed[:, None]
        looked = (column < verify_lens[:, None] - 1) & (counts > 0)
        return looked, looked & (column < counts - 1)

    def take_reliability(self) -> Floats | None:
        """Verified drafts since the last call, by tenth of survival; None if there was none.

        [3, CALIBRATION_BINS]: the sum of their survivals, how many they are, how many stayed.
        """
        found = self._reliability
        if not found[1].any():
            return None
        self._reliability = np.zeros((3, BINS))
        return found

    def survival(self, batch: Batch) -> Floats:
        """[R, G] what is expected of each request's drafts.

        A newcomer counts as others did lately, and as 1 where there were none.
        """
        if not self._per_request:
            rates = np.minimum.accumulate(self._accepted / self._looked)
            return np.tile(rates, (len(batch.rows), 1))
        at, worth = self._worth()
        fresh = self._generation[batch.rows] == batch.generations
        expected = _along(self._survival[batch.rows], at, worth)
        others = (self._drafted @ worth + _PRIOR) / (self._drafted.sum(axis=1) + _PRIOR)
        return np.where(fresh[:, None], expected, others)

    def honest(self, survival: Floats) -> Floats:
        """What drafts of such survivals were worth lately; of larger ones never less.

        A head may promise too little of doubtful drafts, and those are what a budget leaves out: of
        SmolLM2's below a tenth, 6 % were foreseen and 9 % stayed.
        """
        check_survival(survival)
        return _along(survival, *self._worth())

    def _worth(self) -> tuple[Floats, Floats]:
        """[BINS] mean survival of each tenth, and how many of its drafts stay."""
        foreseen, looked, stayed = self._by_tenth
        return foreseen / looked, _rising(stayed, looked)


def _along(survival: Floats, at: Floats, worth: Floats) -> Floats:
    """What survivals are worth, between those that are known; beyond them in proportion."""
    most = min(float(worth[-1] / at[-1]), 1.0)
    expected: Floats = np.interp(survival, [0.0, *at, 1.0], [0.0, *worth, most])
    return expected


def _rising(sums: Floats, counts: Floats) -> Floats:
    """Means that never fall, closest to sums / counts: neighbours that would are taken together.

    Isotonic regression by pooling adjacent violators (Ayer et al., 1955).
    """
    pools = list[tuple[float, float, int]]()
    for pool in zip(sums.tolist(), counts.tolist(), [1] * len(sums), strict=True):
        total, count, width = pool
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            before = pools.pop()
            total, count, width = total + before[0], count + before[1], width + before[2]
        pools.append((total, count, width))
    return np.repeat([total / count for total, count, _ in pools], [width for *_, width in pools])


def _by_tenth(at: Ints, survival: Floats, kept: Bools, num: int) -> Floats:
    """[3, num, BINS] of drafts [N] of `num` rounds: sum of survivals, number, kept.

    Args:
        at: Round and tenth of each, as one number.
        survival: Of each.
        kept: Of each.
        num: Of rounds.
    """
    sums = [
        np.bincount(at, survival, num * BINS),
        np.bincount(at, None, num * BINS),
        np.bincount(at[kept], None, num * BINS),
    ]
    return np.array(sums, dtype=np.float64).reshape(3, num, BINS)


def _joined(arrays: list[Any]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
