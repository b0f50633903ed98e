"""Two runs side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from evals.compare import SCHEMA, compare, read_run


def point(
    width: int, drafted: float | None, plain: float = 100.0, itl: float = 5.0
) -> dict[str, Any]:
    mode = {
        "itl_ms": {"p50": itl, "p99": 2 * itl},
        "ttft_ms": {"p50": 20.0},
        "acceptance": {"acceptance_length": 3.0},
    }
    return {
        "max_num_seqs": width,
        "speedup": None if drafted is None else {"mean": drafted / plain},
        "drafted": None if drafted is None else {**mode, "tokens_per_second": drafted},
        "plain": {**mode, "acceptance": None, "tokens_per_second": plain},
    }


def body(*points: dict[str, Any], **settings: Any) -> dict[str, Any]:
    base = {"model": "/a/m", "model_digest": "1", "temperature": 0.0, "draft": "d"}
    return {
        "schema": SCHEMA,
        "schema_version": 1,
        "settings": {**base, **settings},
        "points": list(points),
    }


def test_changes_in_percent() -> None:
    text = compare(
        body(point(1, 200.0), point(4, 300.0), point(8, 300.0)),
        body(point(1, 220.0, itl=6.0), point(4, 285.0)),
        allow_different=False,
    )
    lines = text.splitlines()
    assert lines[0].startswith("| at once | ")
    assert "200.0 -> 220.0 (+10.0 %)" in lines[2]
    assert "5.00 -> 6.00 (+20.0 % !)" in lines[2]  # slower is worse
    assert "300.0 -> 285.0 (-5.0 % !)" in lines[3]
    assert "100.0 -> 100.0 (+0.0 %)" in lines[3]
    assert not any(line.startswith("| 8") for line in lines)


def test_runs_without_a_drafter_have_no_empty_columns() -> None:
    run = body(point(1, None), draft=None)
    head = compare(run, run, allow_different=False).splitlines()[0]
    assert "plain tok/s" in head
    assert "speed-up" not in head


def test_other_settings_are_refused_unless_allowed() -> None:
    a, b = body(point(1, 200.0)), body(point(1, 200.0), temperature=1.0)
    with pytest.raises(ConfigError, match=r"temperature: 0.0 in A, 1.0 in B") as info:
        compare(a, b, allow_different=False)
    assert "--allow-different" in info.value.hint
    text = compare(a, b, allow_different=True)
    assert text.startswith("Settings differ:\n\n- temperature: 0.0 in A, 1.0 in B\n\n| at once")


def test_the_same_checkpoint_elsewhere_is_the_same() -> None:
    a, b = body(point(1, 200.0)), body(point(1, 200.0), model="/b/m")
    assert "at once" in compare(a, b, allow_different=False)
    c = body(point(1, 200.0), model="/b/m", model_digest="2")
    with pytest.raises(ConfigError, match="model-digest"):
        compare(a, c, allow_different=False)


def test_no_shared_batch_size() -> None:
    with pytest.raises(ConfigError, match="share no batch size"):
        compare(body(point(1, 2.0)), body(point(2, 2.0)), allow_different=False)


def test_only_summaries_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text, message in (
        ("{", "cannot read"),
        ("[]", "not the summary"),
        ('{"schema": "dspark/eval-gsm8k"}', "not the summary"),
        (json.dumps({"schema": SCHEMA, "schema_version": 0}), "schema version"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_run(file)
    (tmp_path / "summary.json").write_text(json.dumps(body(point(1, 2.0))))
    assert read_run(tmp_path)["points"]
