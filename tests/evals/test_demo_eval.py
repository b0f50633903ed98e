"""The demo pair through `dspark eval`, as a user would: files, gates and exit codes."""

import json
from pathlib import Path
from typing import Any

from tests.helpers.command import run_command

ROOT = Path(__file__).parents[2]
HELDOUT = ROOT / "examples" / "demo" / "heldout.jsonl"


def dspark(*args: str) -> int:
    given = (*args, "--quiet", "--device", "cpu")
    # two threads spin where cores are shared
    return run_command(*given, "--threads", "1", cwd=ROOT).returncode


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))
    return found


def test_gsm8k_drafted_and_plain(tmp_path: Path) -> None:
    """All 200 held-out problems in float32: at least 90 % both ways, no flip, no other token."""
    gates = ["--gate", "acc>=0.9,acc_plain>=0.9,flips<=0,mcnemar>0.05,al>=4"]
    given = ["eval", "gsm8k", "--model", "demo", "--data", str(HELDOUT), "--compare-plain"]
    assert dspark(*given, *gates, "--out", str(tmp_path)) == 0
    found = summary(tmp_path)
    assert (found["rows"], found["error"], found["cut_at_the_limit"]) == (200, 0, 0)
    assert found["paired"]["equal_outputs"] == 200
    assert found["output_tokens"] == found["plain"]["output_tokens"]
    accepted = found["acceptance"]
    assert sum(accepted["histogram_of_committed"]) == accepted["rounds"]
    # each row's first token, and one a step that verified no drafts of that row
    alone = 200 + accepted["undrafted_steps"]
    assert found["output_tokens"] == accepted["committed"] + alone
    assert accepted["undrafted_steps"] < accepted["rounds"]
    again = [*given, "--gate", "al>=8.5", "--out", str(tmp_path)]
    assert dspark(*again) == 4
    assert summary(tmp_path)["resumed_requests"] == 200


def test_lossless_in_float32(tmp_path: Path) -> None:
    given = ["eval", "lossless", str(HELDOUT), "--model", "demo", "--limit", "16"]
    assert dspark(*given, "--out", str(tmp_path)) == 0
    assert summary(tmp_path)["rows"] == {"equal": 16, "tie": 0, "bug": 0, "error": 0}
