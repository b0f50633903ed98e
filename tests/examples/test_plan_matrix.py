"""examples/plan_matrix.py: what it makes of runs that end well, that diverge, that say nothing.

The runs themselves need processes: the script is its own test of those.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import plan_matrix
from examples.plan_matrix import WORKLOADS, Cell, equal_outputs, in_waves, run_cells, show
from tests.helpers.engines import make_engine

DEMO = Path(__file__).parents[2] / "examples" / "demo"
DONE = {
    "finished": True,
    "rounds": 10,
    "budgets": 4,
    "keys": 3,
    "round_seconds": 2.0,
    "plans_told": 10,
    "plan_seconds": 0.004,
    "plan_exposed_seconds": 0.001,
    "audits": 10,
    "audit_seconds": 0.002,
    "outputs": "a",
}


def test_a_run_that_fails_costs_that_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps(DONE)
    differs = json.dumps({"error": "the ranks differ", "diverged": True})
    calls = iter([([good, differs], ""), ([], "killed"), ([good], "")])
    asked: list[int] = []

    def in_process(_given: Any, cells: list[Cell]) -> tuple[list[str], str]:
        asked.append(len(cells))
        return next(calls)

    monkeypatch.setattr(plan_matrix, "in_process", in_process)
    cells = [Cell(64, w, "on", False) for w in range(4)]
    results = run_cells(SimpleNamespace(), cells)  # type: ignore[arg-type]
    assert asked == [4, 2, 1]
    assert [r["workload"] for r in results] == [0, 1, 2, 3]
    assert [r.get("error") for r in results] == [None, "the ranks differ", "killed", None]
    row = show("on", False, results, alone=True)
    assert row == ("| overlapped | same | 4 | 2 | 1 | 20 | 4 | 3 | 400 | 0.200 % | 0.050 % | 200 |")
    assert "0.2" not in show("on", True, results, alone=False), "others ran at the same time"


def test_greedy_outputs_are_compared_across_runs() -> None:
    greedy = next(i for i, work in enumerate(WORKLOADS) if not work.temperature)
    runs = [{**DONE, "batch": 64, "workload": greedy} for _ in range(2)]
    assert equal_outputs(runs).endswith("1 of 1 batches")
    assert equal_outputs([*runs, {**runs[0], "outputs": "b"}]).endswith("0 of 1 batches")


def test_requests_come_in_parts() -> None:
    many = list(range(6))
    assert list(in_waves(many, 6, 1)) == many
    assert list(in_waves(many, 6, 3)) == [0, 1, None, None, 2, 3, None, None, 4, 5]


def test_rounds_that_overlap_are_counted_once() -> None:
    assert plan_matrix.covered([(0.0, 2.0), (1.0, 3.0), (2.5, 4.0), (6.0, 7.0)]) == 5.0


def test_a_run_counts_its_own_rounds() -> None:
    engine = make_engine(
        DEMO / "target", DEMO / "drafter", max_num_seqs=3, max_model_len=512, kv_block_size=16
    )
    given: Any = SimpleNamespace(max_tokens=12, prompts=DEMO / "heldout.jsonl")
    refilled = next(i for i, work in enumerate(WORKLOADS) if work.refills > 1)
    for _ in range(2):
        done = plan_matrix.run_cell(engine, given, Cell(3, refilled, "off", False))
        assert done["finished"]
        assert done["rounds"] == sum(done["paths"].values()) > 1
        assert 1 < done["most_at_once"] <= 3
        assert done["round_seconds"] > 0
        assert done["plans_told"] == done["audits"] == 0, "one rank tells nobody"
