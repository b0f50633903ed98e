"""With many requests a decision stands for some rounds, and outcomes are learned from together."""

from collections.abc import Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.spec.cost_table import Cell, CostTable
from engine.spec.history import LAG, Batch, History, Outcome
from engine.spec.plan import Path, Plan
from engine.spec.planner import Planner
from engine.spec.standing import LASTS, MANY
from engine.spec.tiers import Tiers

G, MOST = 4, 64
TIERS = Tiers(MOST, G)
ALL: set[tuple[Path, int, int]] = {
    key
    for slots in TIERS.requests
    for key in (("plain", slots, slots), *(("compact", slots, t) for t in TIERS.tokens(slots)))
}  # type: ignore[assignment]


def planner(draft: float = 1.0, token: float = 0.02, **more: Any) -> Planner:
    sizes = (1, MOST)
    table = CostTable(
        fingerprint={},
        context=16,
        draft=tuple(Cell(r, r * G, draft, 0.0) for r in sizes),
        plain=tuple(Cell(r, r, 4.0, 0.0) for r in sizes),
        verify=tuple(Cell(r, r * (G + 1), 4.0 + r * G * token, 0.0) for r in sizes),
    )
    return Planner("lagged", G, MOST, table, TIERS, **more)


def batch(num: int) -> Batch:
    return Batch(np.arange(num), np.arange(num), 16 * num)


def told(num: int, survival: float) -> Outcome:
    lens, found = np.full(num, G + 1), np.full((num, G), survival)
    committed = np.full(num, 1 + round(survival * G))
    return Outcome(np.arange(num), np.arange(num), lens, committed, found)


def plans(
    p: Planner, num: int, survivals: list[float], captured: Set[tuple[Path, int, int]] = ALL
) -> list[Plan]:
    found = []
    for survival in survivals:
        found.append(p.plan(batch(num), captured))
        p.observe(p.round, told(num, survival))
    return found


@pytest.mark.parametrize("num", [MANY - 1, MANY])
def test_a_large_batch_hears_of_a_change_within_some_rounds(num: int) -> None:
    """All drafts that may count are worthless from round 9 on: a small batch knows at once."""
    changed = 9 + LAG
    budgets = [x.budget for x in plans(planner(), num, [1.0] * 8 + [0.0] * 20)]
    last = max(t for t, budget in enumerate(budgets, 1) if budget == num * G)
    assert last < changed if num < MANY else changed <= last + 1 < changed + LASTS
    assert set(budgets[last:]) != {num * G}


def test_a_standing_plan_is_sound() -> None:
    """What round t drafted has no say in rounds before t + LAG, whatever stands."""
    before = plans(planner(), MOST, [0.9] * 12)
    for t in range(1, 12):
        after = plans(planner(), MOST, [0.9] * (t - 1) + [0.0] * (13 - t))
        assert after[: t + LAG - 1] == before[: t + LAG - 1]


def test_who_comes_and_goes_meanwhile_is_filled_up_for() -> None:
    p = planner()
    first = p.plan(batch(MOST), ALL)
    assert first == Plan("compact", MOST * G, MOST, MOST * (G + 1))
    fewer = p.plan(batch(MOST - 4), ALL)
    assert fewer == replace(first, budget=(MOST - 4) * G), "decided again, it would be 60 slots"
    assert p.predicted == pytest.approx((MOST - 4) * (1 + G))
    many_fewer = p.plan(batch(MOST - 20), ALL)
    assert many_fewer.requests < MOST
    more = p.plan(batch(MOST), ALL)
    assert more.requests == MOST, "more than there are slots"


def test_what_is_no_longer_captured_does_not_stand() -> None:
    p = planner()
    p.plan(batch(MOST), ALL)
    there = {("plain", MOST, MOST)}
    assert p.plan(batch(MOST), there).path == "plain", "a capture that has not paid yet"


def test_plain_steps_that_stand_are_counted_for_the_next_probe() -> None:
    large, small = (
        [x.path for x in plans(planner(draft=90.0), num, [0.2] * 200)] for num in (MOST, 8)
    )
    assert large.count("compact") == 2
    assert large == small


def test_other_modes_decide_every_round() -> None:
    p = planner()
    p.mode = "sync"
    p.plan(batch(MOST), ALL)
    assert p.plan(batch(MOST - 4), ALL).requests < MOST
    p.mode = "all"
    for _ in range(40):
        p.plan(batch(MOST), ALL)
        p.observe(p.round, told(MOST, 0.5))
    assert p.history.num_waiting <= 10, "outcomes wait, but not for ever"


@pytest.mark.parametrize("per_request", [True, False])
def test_outcomes_together_say_what_they_say_one_by_one(per_request: bool) -> None:
    rng = np.random.default_rng(0)
    one_by_one, together = (History(16, G, per_request=per_request) for _ in range(2))
    foreseen = np.zeros(2)
    for t in range(1, 60):
        rows = rng.permutation(16)[: rng.integers(1, 17)]
        lens = rng.integers(1, G + 2, len(rows))
        survival = rng.random((len(rows), G)).cumprod(axis=1)
        outcome = Outcome(
            rows,
            rng.integers(0, 3, len(rows)),
            lens,
            np.minimum(rng.integers(0, G + 2, len(rows)), lens),
            survival if per_request and rng.random() < 0.8 else None,
        )
        for history in (one_by_one, together):
            history.observe(t, outcome)
        one_by_one.settle(t)
        if t % 5 == 0:
            together.settle(t)
            for generation in range(3):
                who = Batch(np.arange(16), np.full(16, generation), 0)
                expected = one_by_one.survival(who)
                np.testing.assert_allclose(together.survival(who), expected, rtol=1e-12)
            found = [history.take_reliability() for history in (one_by_one, together)]
            if per_request:
                np.testing.assert_allclose(*found, rtol=1e-12)  # type: ignore[arg-type]
                assert found[0] is not None
                foreseen += found[0][1:].sum(axis=1)
            else:
                assert found == [None, None]
    assert not per_request or 0 < foreseen[1] < foreseen[0]
