"""examples/compare_speed.py on the demo pair: every way does the same work."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from examples import compare_speed
from examples.compare_speed import DRAFTED, PLAIN, TRANSFORMERS

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def compare(monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    pair = ["--model", str(DEMO / "target"), "--draft", str(DEMO / "drafter")]
    prompts = ["--prompts", str(DEMO / "heldout.jsonl"), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["compare_speed.py", *pair, *prompts, *more])
    compare_speed.main()


def read(path: Path) -> list[dict[str, Any]]:
    points = json.loads(path.read_text())["points"]
    assert isinstance(points, list)
    return points


def test_all_ways_give_the_same_at_every_batch_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "a.json"
    sizes = ("--batches", "3,1", "--limit", "4", "--max-tokens", "40", "--repeats", "1")
    compare(monkeypatch, *sizes, "--json", str(out))
    one, three = read(out)
    assert [one["at_once"], three["at_once"]] == [1, 3]
    assert [one["prompts"], three["prompts"]] == [4, 6]  # full batches only
    for point in (one, three):
        assert set(point["equal"].values()) == {point["prompts"]}
        assert len(set(point["tokens"].values())) == 1
        assert point["tokens"][PLAIN] < 40 * point["prompts"]  # a batch ends its rows by themselves
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in lines] == ["at", "1", "3"]


def test_ignored_ends_make_every_output_as_long_as_allowed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "a.json"
    sizes = ("--batches", "2", "--limit", "2", "--max-tokens", "60", "--repeats", "1")
    compare(monkeypatch, *sizes, "--ignore-eos", "--json", str(out))
    (point,) = read(out)
    assert point["tokens"] == {TRANSFORMERS: 120, PLAIN: 120, DRAFTED: 120}
    assert point["first_difference"] == {TRANSFORMERS: None, PLAIN: None, DRAFTED: None}


def test_a_batch_larger_than_the_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="holds 200 rows, the largest batch needs 201"):
        compare(monkeypatch, "--batches", "201")


def test_first_difference() -> None:
    assert compare_speed.first_difference([1, 2], [1, 2]) is None
    assert compare_speed.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert compare_speed.first_difference([1, 2], [1, 2, 3]) == 2
    assert compare_speed.cut([5, 2, 7, 2], {2}) == [5, 2]
    assert compare_speed.cut([5, 7], {2}) == [5, 7]
