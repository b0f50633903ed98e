"""Scheduled verification through the command line, on the packaged pair."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dspark_cli.main import run
from tests.e2e.test_demo import DEMO
from tests.helpers.command import run_command


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    lines = (DEMO / "heldout.jsonl").read_text("utf-8").splitlines()
    made = [
        {"id": i, "messages": [{"role": "user", "content": json.loads(line)["question"]}]}
        for i, line in enumerate(lines[:16])
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, made)) + "\n")
    return folder


def call(folder: Path, *args: str) -> str:
    done = run_command(*args, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def completions(folder: Path, name: str) -> list[list[int]]:
    return [json.loads(x)["token_ids"] for x in (folder / name).read_text("utf-8").splitlines()]


COMMON = ("--model", "demo", "--threads", "1", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def files(rows: Path) -> Path:
    """costs.json and sts.json of the pair."""
    shared = ("--model", "demo", "--threads", "1")
    small = ("--requests", "1,4", "--widths", "2,4", "--repeats", "2")
    call(rows, "profile", *shared, *small, "-o", "costs.json")
    call(rows, "calibrate", "demo", *shared, "--limit", "40", "-o", "sts.json", "--plot", "p.svg")
    return rows


def test_files_say_what_they_are(files: Path) -> None:
    table = json.loads((files / "costs.json").read_text())
    assert [c["requests"] for c in table["plain"]] == [1, 4]
    assert [c["tokens"] for c in table["verify"]] == [2, 4, 8, 8, 16, 32]
    assert all(c["ms"] > 0 and c["spread"] >= 0 for c in table["verify"])
    assert table["about"]["shapes"]["target"]["vocab_size"] == 1024
    sts = json.loads((files / "sts.json").read_text())
    assert len(sts["temperatures"]) == len(sts["shifts"]) == len(sts["ece_after"]) == 7
    assert sts["overall_after"] < sts["overall_before"]
    assert sts["fingerprint"].items() <= table["fingerprint"].items()
    root = ElementTree.fromstring((files / "p.svg").read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2


def test_every_mode_gives_plain_output(files: Path) -> None:
    call(files, "generate", "in.jsonl", *COMMON, "--draft", "none", "-o", "plain.jsonl")
    want = completions(files, "plain.jsonl")
    both = ("--cost-table", "costs.json", "--calibration", "sts.json")
    for name, options in {
        "all": ("--verify", "all", "--calibration", "sts.json", "--audit"),
        "lagged": ("--verify", "lagged", *both),
        "sync": ("--verify", "sync", *both),
        "default": (),
    }.items():
        said = call(files, "generate", "in.jsonl", *COMMON, *options, "-o", f"{name}.jsonl")
        assert completions(files, f"{name}.jsonl") == want
        assert ("what rounds cost" in said) == (name == "default")
        idle = ("--calibration has no effect: --verify all", "--audit has no effect: there is one")
        assert [said.count(text) for text in idle] == [int(name == "all")] * 2


def test_metrics_and_trace_tell_the_same_story(files: Path) -> None:
    reports = ("--metrics-json", "m.json", "--trace", "t.json", "--cost-table", "costs.json")
    call(files, "generate", "in.jsonl", *COMMON, *reports, "-o", "traced.jsonl")
    done = json.loads((files / "m.json").read_text())["schedule"]
    events: list[dict[str, Any]] = json.loads((files / "t.json").read_text())
    rounds = [e for e in events if e["ph"] == "X"]
    paths = [e["name"] for e in rounds]
    assert {p: paths.count(p) for p in done["rounds_by_path"]} == done["rounds_by_path"]
    args = [e["args"] for e in rounds]
    assert sum(a["scheduled tokens"] for a in args) == done["target_tokens_scheduled"]
    assert sum(a["tier"] for a in args) == done["target_tokens_computed"]
    assert sum(a["committed tokens"] for a in args) == done["realised_tokens"]
    assert [a["round"] for a in args] == list(range(1, len(args) + 1))
    assert all(e["dur"] > 0 for e in rounds)
    assert [e["ts"] for e in rounds] == sorted(e["ts"] for e in rounds)
    predicted = done["predicted_tokens"] / done["realised_tokens"]
    assert 0.7 < predicted < 1.4
    assert 0.0 < done["calibration_error"] < 0.3
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"target tokens", "requests", "budget a request", "tokens a round"}


def test_a_dry_run_takes_files_that_fit(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose device they are of is not known then."""
    monkeypatch.chdir(files)
    elsewhere = json.loads((files / "costs.json").read_text())
    elsewhere["fingerprint"]["device"] = "another"
    (files / "elsewhere.json").write_text(json.dumps(elsewhere))
    both = ("--cost-table", "elsewhere.json", "--calibration", "sts.json")
    with pytest.raises(SystemExit) as info:
        run(["generate", "in.jsonl", *COMMON, *both, "--dry-run"])
    assert info.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--draft", "demo-rnn", "--cost-table", "costs.json"), "draft is"),
        (("--draft", "demo-rnn", "--calibration", "sts.json"), "draft is"),
        (("-g", "3", "--calibration", "sts.json"), "num_speculative_tokens is 3 here, 7 there"),
        (("--calibration", "costs.json"), "--calibration costs.json: the file's schema is"),
        (("--cost-table", "nan.json"), "--cost-table nan.json: the cost table is damaged: times"),
        (("--cost-table", "nan.json"), "hint: make it again: dspark profile"),
        (("--dry-run", "--cost-table", "nan.json"), "--cost-table nan.json: the cost table is"),
        (("--dry-run", "--draft", "demo-rnn", "--cost-table", "costs.json"), "draft is"),
        (("--dry-run", "-g", "3", "--calibration", "sts.json"), "is 3 here, 7 there"),
        (("--verify", "all", "--cost-table", "costs.json"), "unused"),
        (("--draft", "none", "--verify", "lagged"), "there is no draft"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    files: Path,
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    damaged = json.loads((files / "costs.json").read_text())
    damaged["plain"][0]["ms"] = float("nan")
    (files / "nan.json").write_text(json.dumps(damaged))
    with pytest.raises(SystemExit) as info:
        run(["generate", "in.jsonl", *COMMON, *args, "-o", "refused.jsonl", "--overwrite"])
    assert info.value.code == 2
    assert message in capsys.readouterr().err
