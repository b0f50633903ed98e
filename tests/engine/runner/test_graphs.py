"""Which captured round serves a batch; capturing itself is tested on a GPU (test_cuda.py)."""

from typing import Literal

import numpy as np
import pytest

from engine.spec.cost_table import Cell, CostTable
from engine.spec.history import Batch
from engine.spec.plan import Path
from engine.spec.planner import Planner
from engine.spec.tiers import Tiers


def test_a_shrinking_batch_reuses_what_is_captured() -> None:
    """Every tier was captured once on the way down: a second of stalls for a few rounds each."""
    planner = Planner("all", 7, 64, None, Tiers(64, 7))
    captured: set[tuple[Path, int, int]] = set()
    used = []
    for n in range(64, 0, -1):
        rows = np.arange(n)
        plan = planner.plan(Batch(rows, rows, 100 * n), captured)
        used.append(plan.requests)
        assert n <= plan.requests <= max(2 * n, 8)
        assert plan.tokens == 8 * plan.requests
        captured.add((plan.path, plan.requests, plan.tokens))
    assert len(set(used)) <= 4
    planner.plain_only = True
    rows = np.arange(40)
    plan = planner.plan(Batch(rows, rows, 4000), captured)
    assert (plan.path, plan.requests) == ("plain", 40), "another path has its own graphs"


def growing(
    planner: Planner, captured: set[tuple[Path, int, int]], steps: list[tuple[int, int]]
) -> list[int]:
    """Slots of the rounds of a batch of so many requests, and soon so many."""
    used = []
    for n, soon in steps:
        plan = planner.plan(Batch(np.arange(n), np.arange(n), 100 * n, soon=soon), captured)
        captured.add((plan.path, plan.requests, plan.tokens))
        used.append(plan.requests)
    return used


def planner_of(mode: Literal["all", "lagged"], num_rows: int = 256) -> Planner:
    sizes = 1, 256
    table = CostTable(
        fingerprint={},
        context=16,
        draft=tuple(Cell(n, 7 * n, 1.0, 0.0) for n in sizes),
        plain=tuple(Cell(n, n, 4.0, 0.0) for n in sizes),
        verify=tuple(Cell(n, 8 * n, 5.0, 0.0) for n in sizes),
    )
    return Planner(mode, 7, num_rows, table, Tiers(num_rows, 7))


@pytest.mark.parametrize("mode", ["all", "lagged"])
def test_a_growing_batch_is_captured_once(mode: Literal["all", "lagged"]) -> None:
    """Five sizes were captured on the way up, two seconds of stalls, and never used again."""
    steps = [(n, 256) for n in (54, 108, 162, 216, 256)]
    assert growing(planner_of(mode), set(), steps) == [256] * 5


@pytest.mark.parametrize("mode", ["all", "lagged"])
def test_a_batch_whose_future_grows_as_well_is_captured_where_it_outgrows_a_size(
    mode: Literal["all", "lagged"],
) -> None:
    """8 more a step, and 64 more in sight: 80, 88 and 96 were captured on the way to 104."""
    steps = [(n, min(n + 64, 256)) for n in range(8, 257, 8)]
    used = growing(planner_of(mode), set(), steps)
    assert list(dict.fromkeys(used)) == [72, 144, 224, 256]
    assert all(slots >= n for slots, (n, _) in zip(used, steps, strict=True))


def test_padding_is_borne_until_it_has_cost_a_capture() -> None:
    """40 requests in 64 slots, 0.375 of each round for nothing: the 171st is captured."""
    planner = planner_of("all", 64)
    captured: set[tuple[Path, int, int]] = {("full", 64, 512)}
    assert growing(planner, captured, [(40, 40)] * 200) == [64] * 170 + [40] * 30
    # graphs that were let go, or of other sampling: it has to cost as much again
    again: set[tuple[Path, int, int]] = {("full", 64, 512)}
    assert growing(planner, again, [(40, 40)] * 171) == [64] * 170 + [40]
    # 10 requests in 16 slots, 128 tokens: the weights are read as fast
    captured.add(("full", 16, 128))
    assert growing(planner, captured, [(10, 10)] * 500) == [16] * 500


def test_a_batch_that_is_always_about_to_grow_a_little_does_not_bear_padding_for_good() -> None:
    """Long prompts: there is always one or two more to come, and never 64."""
    captured: set[tuple[Path, int, int]] = {("full", 64, 512)}
    used = growing(planner_of("all", 64), captured, [(40, 42)] * 300)
    assert used[:100] == [64] * 100
    assert used[-80:] == [44] * 80
    # about to grow to 64, it has the size it needs
    assert growing(planner_of("all", 64), {("full", 64, 512)}, [(40, 64)] * 300) == [64] * 300
