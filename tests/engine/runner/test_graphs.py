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


def growing(planner: Planner, captured: set[tuple[Path, int, int]], steps: list[int]) -> list[int]:
    """Slots of the rounds of a batch that has `steps` requests, one size after the other."""
    used = []
    for n in steps:
        plan = planner.plan(Batch(np.arange(n), np.arange(n), 100 * n, soon=steps[-1]), captured)
        captured.add((plan.path, plan.requests, plan.tokens))
        used.append(plan.requests)
    return used


@pytest.mark.parametrize("mode", ["all", "lagged"])
def test_a_growing_batch_is_captured_once(mode: Literal["all", "lagged"]) -> None:
    """Five sizes were captured on the way up, two seconds of stalls, and never used again."""
    table = None
    if mode == "lagged":
        sizes = 1, 256
        table = CostTable(
            fingerprint={},
            context=16,
            draft=tuple(Cell(n, 7 * n, 1.0, 0.0) for n in sizes),
            plain=tuple(Cell(n, n, 4.0, 0.0) for n in sizes),
            verify=tuple(Cell(n, 8 * n, 5.0, 0.0) for n in sizes),
        )
    planner = Planner(mode, 7, 256, table, Tiers(256, 7))
    assert growing(planner, set(), [54, 108, 162, 216, 256]) == [256] * 5


def test_padding_is_borne_until_it_has_cost_a_capture() -> None:
    """40 requests in 64 slots, 0.375 of each round for nothing: the 171st is captured."""
    planner = Planner("all", 7, 64, None, Tiers(64, 7))
    captured: set[tuple[Path, int, int]] = {("full", 64, 512)}
    rows = np.arange(40)
    used = [planner.plan(Batch(rows, rows, 4000), captured).requests for _ in range(200)]
    assert used == [64] * 170 + [40] * 30
    # 10 requests in 16 slots, 128 tokens: the weights are read as fast
    captured.add(("full", 16, 128))
    few = np.arange(10)
    used = [planner.plan(Batch(few, few, 1000), captured).requests for _ in range(500)]
    assert used == [16] * 500
