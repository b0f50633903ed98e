"""Which captured round serves a batch; capturing itself is tested on a GPU (test_cuda.py)."""

import numpy as np

from engine.spec.plan import Path
from engine.spec.planner import Batch, Planner
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
