"""examples/budget_by_load.py draws what --metrics-json says."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples import budget_by_load

REPORTS = Path(__file__).parents[2] / "examples" / "reports"
SVG = "{http://www.w3.org/2000/svg}"


def metrics(requests: int, budget: float) -> dict[str, Any]:
    return {
        "schedule": {
            "drafts_verified_per_request_round": budget,
            "rounds_by_path": {"plain": 1, "full": 0, "compact": 3},
        },
        "acceptance": {"acceptance_length": 4.0},
        "speed": {"output_tokens_per_second": 100.0},
        "manifest": {
            "settings": {
                "max_num_seqs": requests,
                "num_speculative_tokens": 7,
                "device": "cpu",
                "model_name": "/some/where/demo",
                "verify": "lagged",
            }
        },
    }


def test_metrics_of_runs_become_figures_and_a_plot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = []
    for requests, budget in ((64, 2.0), (1, 6.5), (8, 5.0)):
        files.append(tmp_path / f"{requests}.json")
        files[-1].write_text(json.dumps(metrics(requests, budget)))
    out = tmp_path / "plot"
    argv = ["budget_by_load.py", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*argv, "--metrics", *map(str, files)])
    budget_by_load.main()
    points = json.loads(out.with_suffix(".json").read_text())
    assert [(p["requests"], p["budget"]) for p in points] == [(1, 6.5), (8, 5.0), (64, 2.0)]
    assert {(p["target"], p["plain_rounds"]) for p in points} == {("demo", 0.25)}
    drawn = out.with_suffix(".svg").read_text()
    circles = ElementTree.fromstring(drawn).findall(f"{SVG}circle")
    heights = [float(c.attrib["cy"]) for c in circles]
    assert heights == sorted(heights), "fewer drafts are further down"
    out.with_suffix(".svg").unlink()
    monkeypatch.setattr(sys, "argv", [*argv, "--redraw"])
    budget_by_load.main()
    assert out.with_suffix(".svg").read_text() == drawn


def test_the_plot_in_readme_is_of_the_figures_beside_it() -> None:
    points = json.loads((REPORTS / "budget_by_load.json").read_text())
    assert (REPORTS / "budget_by_load.svg").read_text() == budget_by_load.draw(points)
    budgets = [p["budget"] for p in points]
    assert budgets == sorted(budgets, reverse=True), "it falls as the load rises"


def test_options_after_two_dashes_are_generates() -> None:
    given, options = budget_by_load.parse(["--requests", "1,8", "--", "--model", "m"])
    assert (given.requests, options) == ("1,8", ["--model", "m"])
    assert budget_by_load.parse([])[1] == []
