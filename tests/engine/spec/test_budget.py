"""How many drafts to verify: brute force, the ends, and what must not be anticipated."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine.kernels.verify_plan import verify_lens
from engine.spec.budget import best_budget, convex_below, expected_tokens, first_drop_budget
from engine.spec.cost_table import Cell, CostTable
from engine.spec.host_times import HostTimes
from engine.spec.plan import Plan
from engine.spec.planner import Planner
from engine.spec.tiers import Tiers

G = 4


def survivals(max_reqs: int = 5) -> st.SearchStrategy[np.ndarray]:
    shape = st.tuples(st.integers(1, max_reqs), st.integers(1, 4))
    cells = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0.0, 1.0, width=32))
    return arrays(np.float64, shape, elements=cells).map(lambda c: c.cumprod(axis=1))


def costs(count: int, data: st.DataObject) -> np.ndarray:
    """Milliseconds that rise: smooth, flat, or in cliffs."""
    steps = st.one_of(st.just(0.0), st.floats(0.0, 5.0), st.just(100.0))
    rises = data.draw(st.lists(steps, min_size=count, max_size=count))
    return data.draw(st.floats(0.125, 10.0)) + np.cumsum(rises)


@settings(max_examples=300)
@given(survivals(), st.data())
def test_the_budget_is_brute_forces(survival: np.ndarray, data: st.DataObject) -> None:
    ms = costs(survival.size + 1, data)
    gains = sorted(survival.ravel().tolist(), reverse=True)
    rates = [(len(survival) + sum(gains[:b])) / ms[b] for b in range(len(gains) + 1)]
    tokens = expected_tokens(survival)
    best = best_budget(tokens, ms)
    assert rates[best] == pytest.approx(max(rates), rel=1e-12)
    assert all(rate < rates[best] * (1 + 1e-12) for rate in rates[:best])
    stop = first_drop_budget(tokens, ms)
    assert all(rates[b + 1] > rates[b] * (1 - 1e-12) for b in range(stop))
    assert stop == len(gains) or rates[stop + 1] <= rates[stop] * (1 + 1e-12)


@pytest.mark.parametrize("survival", [0.0, 1.0])
def test_budgets_at_the_ends(survival: float) -> None:
    """A flat table: what never stays is not worth a look, what always stays is."""
    for num in (1, 6):
        tokens = expected_tokens(np.full((num, G), survival))
        flat = np.full(num * G + 1, 3.0)
        want = int(survival) * num * G
        assert best_budget(tokens, flat) == first_drop_budget(tokens, flat) == want


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.1])
def test_survivals_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="survival"):
        expected_tokens(np.array([[0.5, bad]]))


@settings(max_examples=300)
@given(survivals(), st.data())
def test_algorithm_1_does_not_anticipate(confidence: np.ndarray, data: st.DataObject) -> None:
    """Draft k of a request decides confidences after k; whatever they are, k is verified or not."""
    num, gamma = confidence.shape
    ms = costs(num * gamma + 1, data)
    r, k = data.draw(st.integers(0, num - 1)), data.draw(st.integers(0, gamma - 1))
    later = data.draw(st.lists(st.floats(0, 1, width=32), min_size=gamma, max_size=gamma))
    changed = confidence.copy()
    changed[r, k + 1 :] = later[k + 1 :]
    admitted = [admits(c, ms, r, k, search_all=False) for c in (confidence, changed)]
    assert admitted[0] == admitted[1]


def test_a_revised_plan_does_not_anticipate_whatever_the_host_takes() -> None:
    """The host's part goes by expected tokens: taken into the curve along tiers, later survivals
    changed its slope before them, in one trial of a thousand."""
    num, gamma, rng = 64, 7, np.random.default_rng(0)
    tiers = Tiers(num, gamma)
    plan, budgets = Plan("compact", 0, num, num), set()
    for _ in range(4000):
        rises = rng.random(len(tiers.tokens(num))) ** 3
        verify = zip(tiers.tokens(num), 1.0 + np.cumsum(rises), strict=True)
        costs = CostTable(
            fingerprint={},
            context=1,
            draft=(Cell(num, num * gamma, 0.4, 0.0),),
            plain=(Cell(num, num, 1.0, 0.0),),
            verify=tuple(Cell(num, size, float(ms), 0.0) for size, ms in verify),
        )
        host = HostTimes(overlapped=True)
        more = float(rng.uniform(0.2, 3.0))
        for alone in (True, False):
            host.note(1.0 + more * (not alone), (num, True), alone=alone, tokens=96)
        p = Planner("sync", gamma, num, costs, tiers, fill=False, host=host)
        one = rng.random((num, gamma)).cumprod(axis=1)
        cut = int(rng.integers(num * gamma))
        other, last = one.copy(), np.sort(one, axis=None)[::-1][cut]
        lower = one < last
        other[lower] = rng.random(int(lower.sum())) * last * rng.random()
        a, b = (p.replan(plan, x, 1).budget or 0 for x in (one, other))
        assert a == b or min(a, b) >= cut
        budgets.add(a)
    assert len(budgets) > 100


def admits(confidence: np.ndarray, ms: np.ndarray, r: int, k: int, *, search_all: bool) -> bool:
    survival = torch.from_numpy(confidence).float().cumprod(dim=1)
    tokens = expected_tokens(survival.double().numpy())
    budget = (best_budget if search_all else first_drop_budget)(tokens, ms)
    live = torch.ones(len(confidence), dtype=torch.bool)
    starts = torch.zeros(len(confidence), dtype=torch.int64)
    return bool(verify_lens(survival, starts, live, torch.tensor([budget])).lens[r] - 1 > k)


def test_a_global_search_on_current_survivals_does_anticipate() -> None:
    """Negative control, in the spirit of the paper's appendix A: the second confidence, which the
    first draft decides, decides whether the first draft is verified."""
    ms = np.array([1.0, 2.0, 2.1])
    low, high = np.array([[0.5, 0.0]]), np.array([[0.5, 1.0]])
    assert not admits(low, ms, 0, 0, search_all=True)
    assert not admits(high, ms, 0, 0, search_all=True)
    ms = np.array([1.0, 1.6, 1.7])
    low, high = np.array([[0.5, 0.0]]), np.array([[0.5, 1.0]])
    assert not admits(low, ms, 0, 0, search_all=True)
    assert admits(high, ms, 0, 0, search_all=True)
    assert not admits(high, ms, 0, 0, search_all=False)


@settings(max_examples=200)
@given(st.data())
def test_the_curve_below_the_costs_is_convex_and_touches_them(data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=8))
    ends = np.concatenate(([0], np.cumsum(gaps, dtype=np.int64)))
    ms = costs(len(ends), data)
    curve = convex_below(ends, ms)
    assert curve.shape == (ends[-1] + 1,)
    assert (curve[ends] <= ms * (1 + 1e-12)).all()
    assert (curve[[0, -1]] == ms[[0, -1]]).all()
    assert (np.diff(curve, 2) >= -1e-9 * curve[-1]).all()
    corners = np.flatnonzero(np.diff(curve, 2) > 1e-6) + 1
    assert curve[corners] == pytest.approx([ms[ends.tolist().index(b)] for b in corners])


@settings(max_examples=200)
@given(survivals(), st.data())
def test_algorithm_1_along_a_convex_curve_finds_the_best(
    survival: np.ndarray, data: st.DataObject
) -> None:
    tokens = expected_tokens(survival)
    curve = convex_below(np.arange(len(tokens)), costs(len(tokens), data))
    rates = tokens / curve
    assert rates[first_drop_budget(tokens, curve)] == pytest.approx(rates.max(), rel=1e-9)
