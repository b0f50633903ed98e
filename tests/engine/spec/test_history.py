"""What drafts of a survival were worth, learned on the way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.spec.history import LAG, Batch, Floats, History, Outcome, _rising
from engine.spec.planner import Planner
from tests.engine.spec.test_planner import G, table

R = 8
WHO = Batch(np.arange(R), np.zeros(R, dtype=np.int64), 16 * R)
GRID = np.linspace(0.0, 1.0, 101)


def drawn(rng: np.random.Generator, power: float, lens: int = G + 1) -> Outcome:
    """Drafts that stay as often as their survival to a power says, `lens` - 1 of them checked."""
    survival = rng.uniform(0.3, 1.0, (R, G)).cumprod(axis=1)
    stay = survival**power
    chance = np.concatenate([stay[:, :1], stay[:, 1:] / stay[:, :-1]], axis=1)
    kept = (rng.random((R, G)) < chance).cumprod(axis=1).sum(axis=1)
    committed = np.minimum(1 + kept, lens)
    return Outcome(np.arange(R), np.zeros(R, np.int64), np.full(R, lens), committed, survival)


def taught(outcomes: list[Outcome]) -> History:
    history = History(R, G, per_request=True)
    for t, outcome in enumerate(outcomes, 1):
        history.observe(t, outcome)
    history.settle(len(outcomes) + LAG)
    return history


def test_before_anything_is_known_a_survival_is_taken_at_its_word() -> None:
    np.testing.assert_allclose(History(R, G, per_request=True).honest(GRID), GRID, atol=1e-12)


@pytest.mark.parametrize("power", [0.6, 1.0, 2.0])
def test_what_drafts_of_a_survival_are_worth_is_learned(power: float) -> None:
    """Seeded; 0.1 is some two and a half deviations of what 50 rounds say of a tenth."""
    rng = np.random.default_rng(5)
    honest = taught([drawn(rng, power) for _ in range(300)]).honest(GRID)
    assert (np.diff(honest) >= 0).all()
    seen = (GRID > 0.1) & (GRID < 0.95)
    np.testing.assert_allclose(honest[seen], GRID[seen] ** power, atol=0.1)


def test_doubtful_drafts_that_stay_more_often_than_promised_are_verified() -> None:
    """SmolLM2's below a tenth stayed 1.5 times as often as foreseen; a scale by position, which all
    drafts make up, sees next to none of that."""

    def budget(power: float, token: float) -> float:
        rng = np.random.default_rng(7)
        p = Planner("lagged", G, R, table(draft=1.0, plain=20.0, token=token), None)
        budgets = []
        for t in range(1, 200):
            plan = p.plan(WHO, set())
            p.observe(t, drawn(rng, power))
            if t > 100:
                budgets.append(plan.budget if plan.budget is not None else 0)
        return float(np.mean(budgets))

    honest, modest = budget(1.0, 0.35), budget(0.4, 0.35)
    assert honest + 4 < modest, "the same survivals, of which more stay"


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_a_newcomer_is_worth_what_others_are_on_average(power: float) -> None:
    """Not what the average of their survivals is worth: half of them are easy and half are hard."""
    rng = np.random.default_rng(11)

    each = np.where(np.arange(R) % 2, 0.97, 0.45)[:, None]
    survival = np.repeat(each, G, axis=1).cumprod(axis=1)
    stay = survival**power

    def mixed() -> Outcome:
        outcome = drawn(rng, power)
        chance = np.concatenate([stay[:, :1], stay[:, 1:] / stay[:, :-1]], axis=1)
        kept = (rng.random((R, G)) < chance).cumprod(axis=1).sum(axis=1)
        return replace(outcome, committed=1 + kept, survival=survival.copy())

    history = taught([mixed() for _ in range(600)])
    newcomer = history.survival(replace(WHO, generations=WHO.generations + 1))
    assert (newcomer == newcomer[0]).all()
    assert (np.diff(newcomer[0]) <= 0).all()
    # of which 0.02 are the 16 certain ones it begins with, beside some 400
    np.testing.assert_allclose(newcomer[0], stay.mean(axis=0), atol=0.05)


@pytest.mark.parametrize("wrong", [np.nan, -0.1, 1.2])
def test_what_is_no_survival_is_refused(wrong: float) -> None:
    history = History(R, G, per_request=True)
    with pytest.raises(ValueError, match="survival: must be in"):
        history.honest(np.full((1, G), wrong))
    outcome = drawn(np.random.default_rng(0), 1.0)
    assert outcome.survival is not None
    outcome.survival[-1, -1] = wrong
    history.observe(1, outcome)
    with pytest.raises(ValueError, match="survival: must be in"):
        history.settle(1 + LAG)


def test_drafts_the_target_never_looked_at_say_nothing() -> None:
    rng = np.random.default_rng(3)
    none = taught([drawn(rng, 1.0, lens=1) for _ in range(50)])
    np.testing.assert_allclose(none.honest(GRID), GRID, atol=1e-12)


def test_what_was_learned_fades() -> None:
    rng = np.random.default_rng(3)
    history = taught(
        [*(drawn(rng, 3.0) for _ in range(50)), *(drawn(rng, 1.0) for _ in range(400))]
    )
    seen = (GRID > 0.1) & (GRID < 0.95)
    np.testing.assert_allclose(history.honest(GRID)[seen], GRID[seen], atol=0.1)


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.1, 50.0)), min_size=1, max_size=10),
)
def test_rising_is_isotonic_regression(bins: list[tuple[float, float]]) -> None:
    """Against its minimax form: the largest, of starts to the left, of the least mean from there
    to an end to the right (Robertson, Wright and Dykstra, 1988, theorem 1.4.4)."""
    means, counts = (np.array(x) for x in zip(*bins, strict=True))
    sums = means * counts
    n = len(sums)

    def mean(i: int, j: int) -> float:
        return float(sums[i : j + 1].sum() / counts[i : j + 1].sum())

    expected: Floats = np.array(
        [max(min(mean(i, k) for k in range(j, n)) for i in range(j + 1)) for j in range(n)]
    )
    np.testing.assert_allclose(_rising(sums, counts), expected, atol=1e-9)


def test_sync_takes_survivals_for_what_they_were_worth() -> None:
    """Of this round, too: the map is of older rounds, and keeps the order."""
    budgets = []
    for power in (0.4, 1.0, 3.0):
        rng = np.random.default_rng(1)
        p = Planner("sync", G, R, table(draft=1.0, plain=20.0, token=0.35), None)
        for t in range(1, 100):
            plan = p.plan(WHO, set())
            p.observe(t, drawn(rng, power))
        survival = np.random.default_rng(2).uniform(0.3, 1.0, (R, G)).cumprod(axis=1)
        budgets.append(p.replan(plan, survival, WHO.kv_tokens).budget or 0)
    assert budgets[0] > budgets[1] > budgets[2]
