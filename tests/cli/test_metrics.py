"""What a run reports of its devices."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from dspark_cli.main import run
from dspark_cli.metrics import _speed, merge_metrics
from engine.telemetry import EngineStats


def test_the_share_of_the_loop_in_which_devices_worked() -> None:
    """Loading, warm-up and the host's own seconds do not count."""
    spent = {"load": 9.0, "warm-up": 9.0, "prefill": 1.0, "draft": 0.5, "verify": 2.0, "host": 0.4}
    stats = EngineStats(seconds=spent)
    assert _speed(stats, 4.0, 4.0)["device_share"] == 0.875
    assert _speed(stats, 4.0, 8.0)["device_share"] == 0.4375, "two engines"
    assert _speed(stats, 3.4, 3.4)["device_share"] == 1.0, "phases are rounded, and overlap"
    assert _speed(stats, 0.0, 0.0)["device_share"] is None


def test_of_a_run(tmp_path: Path) -> None:
    rows, metrics = tmp_path / "in.jsonl", tmp_path / "m.json"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + {i} ="}) + "\n" for i in range(6)))
    given = ["generate", str(rows), "-o", str(tmp_path / "out.jsonl"), "--model", "demo"]
    with pytest.raises(SystemExit) as info:
        run([*given, "--device", "cpu", "--max-tokens", "24", "--metrics-json", str(metrics)])
    assert not info.value.code
    found = json.loads(metrics.read_text())
    speed = found["speed"]
    phases = speed["seconds_by_phase"]
    worked = sum(phases.get(name, 0.0) for name in ("prefill", "draft", "verify"))
    assert 0.2 < speed["device_share"] <= 1.0
    assert speed["device_share"] == pytest.approx(worked / speed["seconds"], abs=0.02)
    found["manifest"]["settings"]["shard"] = "1/2"
    longer = deepcopy(found)
    longer["speed"]["seconds"] *= 3
    merged = merge_metrics([found, longer])["speed"]
    assert merged["seconds"] == pytest.approx(3 * speed["seconds"], abs=0.01)
    expected = 2 * worked / (4 * speed["seconds"])
    assert merged["device_share"] == pytest.approx(expected, abs=0.02), "each shard's own seconds"
    longer["speed"]["device_share"] = None
    assert merge_metrics([found, longer])["speed"]["device_share"] is None, "of a cluster"
