"""`dspark bench throughput`: options, data, files; the engine is a fake that keeps real time."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dspark_cli import backend
from dspark_cli.main import run
from tests.cli import fake
from tests.cli.conftest import Result, make_checkpoints
from tests.cli.test_main import loaded_after
from tests.helpers.speed_bench import ROWS, as_messages, placeholder, write_lines
from tests.helpers.timed_engine import TimedEngine

Call = Callable[..., Result]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Call:
    make_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "locate_checkpoint", fake.locate)
    monkeypatch.setattr(backend, "load_engine", partial(TimedEngine, real_time=True))

    def bench(*args: str, code: int = 0) -> Result:
        with pytest.raises(SystemExit) as info:
            run(["bench", "throughput", *args])
        out, err = capsysbinary.readouterr()
        result = Result(int(info.value.code or 0), out, err.decode())
        assert result.code == code, result.err
        return result

    return bench


def pair(*rest: str) -> tuple[str, ...]:
    return ("-m", "m", "-d", "d", *rest)


def prompts(tmp_path: Path, count: int = 12) -> str:
    rows = [{"prompt": f"number {n}", "answer": n} for n in range(count)]
    return str(write_lines(tmp_path / "p.jsonl", rows))


def test_a_run_prints_a_table_and_writes_everything(call: Call, tmp_path: Path) -> None:
    data = prompts(tmp_path)
    done = call(*pair("--data", data, "--max-num-seqs", "2,1", "--output-json", "a.json"))
    assert done.out == b""
    cells = [line.split()[1] for line in done.err.splitlines() if line.startswith("|")]
    assert [cell for cell in cells if cell.isdecimal()] == ["1", "2", "1", "2"]
    body = json.loads((tmp_path / "a.json").read_text())
    assert (body["schema"], body["schema_version"]) == ("dspark/bench-throughput", 1)
    assert [p["requests"] for p in body["points"]] == [8, 8]
    for point in body["points"]:
        assert point["equal_outputs"] == [8, 8]
        found = point["drafted"]["acceptance"]
        assert sum(found["histogram_of_committed"]) == found["rounds"]
    assert body["settings"]["num_speculative_tokens"] == 4
    assert body["manifest"]["command"].split()[0] == "dspark"
    assert "natural end of output, at most 256 tokens" in done.err


def test_stdout_takes_the_json_alone(call: Call, tmp_path: Path) -> None:
    data = prompts(tmp_path)
    done = call(*pair("--data", data, "--max-num-seqs", "1", "--output-json", "-", "-q"))
    assert json.loads(done.out)["points"][0]["max_num_seqs"] == 1
    assert done.err == ""


def test_reports_of_an_earlier_run_are_kept(call: Call, tmp_path: Path) -> None:
    args = pair("--data", prompts(tmp_path), "--max-num-seqs", "1,2", "--out", "r")
    call(*args)
    names = {"summary.json", "per_request.jsonl", "matrix.csv", "manifest.json", "report.html"}
    assert {p.name for p in (tmp_path / "r").iterdir()} == names
    assert "exists" in call(*args, code=2).err
    call(*args, "--overwrite")


def test_compare(call: Call, tmp_path: Path) -> None:
    args = pair("--data", prompts(tmp_path), "--max-num-seqs", "1")
    call(*args, "--output-json", "a.json")
    call(*args, "--out", "b")
    done = call("--compare", "a.json", "b")
    assert done.out.startswith(b"| at once | ")
    call(*args, "--output-json", "c.json", "--temperature", "1")
    assert "temperature: 0.0 in A, 1.0 in B" in call("--compare", "a.json", "c.json", code=2).err
    done = call("--compare", "a.json", "c.json", "--allow-different")
    assert done.out.startswith(b"Settings differ:")


def test_random_prompts_and_forced_lengths_say_what_they_are(call: Call) -> None:
    args = ("--data", "random", "--input-len", "5", "--output-len", "6", "--ignore-eos")
    done = call(*pair(*args, "--max-num-seqs", "1", "--output-json", "r.json"))
    assert "8 prompts of random, 5 to 5 tokens" in done.err
    assert "forced to 6 tokens (--ignore-eos)" in done.err
    assert "random prompts: acceptance and speed-up say nothing" in done.err
    assert "text after the end is forced" in done.err
    settings = json.loads(Path("r.json").read_text())["settings"]
    assert (settings["max_tokens"], settings["ignore_eos"]) == (6, True)


def test_the_first_token_and_shortages_are_told(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speeds of 8 at once, of which 2 ran, are not those of 8 at once."""

    def load(*args: Any) -> TimedEngine:
        engine = TimedEngine(*args, real_time=True)
        stats = engine.stats
        stats.out_of_memory, stats.max_num_seqs, stats.max_num_batched_tokens = 3, 2, 512
        stats.until_first_token = {"load": 1.0, "warm-up": 0.5, "capture": 0.25, "rest": 0.25}
        return engine

    monkeypatch.setattr(backend, "load_engine", load)
    done = call(*pair("--data", prompts(tmp_path), "--max-num-seqs", "1"))
    assert done.err.count("dspark: first token ") == 1
    assert "loading 1.0, warm-up and capture 0.8, prompt to token 0.2" in done.err
    assert "going on with at most 2 requests at once" in done.err
    assert "larger batches were not what they say" in done.err


def test_without_a_drafter_plain_alone_is_measured(call: Call, tmp_path: Path) -> None:
    done = call("-m", "m", "--data", prompts(tmp_path), "--max-num-seqs", "1", "--out", "r")
    assert "no drafter: nothing to compare" in done.err
    assert json.loads(Path("r/summary.json").read_text())["points"][0]["drafted"] is None


def test_rows_of_known_data_sets(call: Call, tmp_path: Path) -> None:
    gsm8k = write_lines(tmp_path / "g.jsonl", [{"question": "1+1?", "answer": "#### 2"}] * 4)
    call(*pair("--data", str(gsm8k), "--max-num-seqs", "1"))
    for rows in (ROWS, as_messages(ROWS)):
        file = write_lines(tmp_path / "qualitative.jsonl", rows)
        done = call(*pair("--data", str(file), "--max-num-seqs", "1"))
        assert "note: first turns only: 2 rows have more" in done.err
    file = write_lines(tmp_path / "qualitative.jsonl", [placeholder(1, "cais/hle", "x")])
    done = call(*pair("--data", str(file), "--max-num-seqs", "1"), code=2)
    assert "line 1: the row is a placeholder" in done.err
    assert "dspark data speed-bench prepare" in done.err


def test_too_few_rows_are_noted(call: Call, tmp_path: Path) -> None:
    done = call(*pair("--data", prompts(tmp_path, 6), "--max-num-seqs", "4"))
    assert "6 requests for a batch of 4: mostly ramp and tail" in done.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--data", "x"), "no --model"),
        (("-m", "m"), "no --data"),
        (("-m", "m", "--data", "x", "--input-len", "4"), "are for --data random"),
        (("-m", "m", "--data", "x", "--allow-different"), "is for --compare"),
        (("-m", "m", "--data", "x", "--overwrite"), "is for --out"),
        (("-m", "m", "--data", "x", "--output-json", "no/a.json"), "no folder no"),
        (("-m", "m", "--data", "x.jsonl"), "no such input"),
    ],
)
def test_contradictions_end_before_anything_is_measured(
    args: tuple[str, ...], message: str, call: Call
) -> None:
    assert message in call(*args, code=2).err


def test_a_bad_row_is_named(call: Call, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": 7}])
    assert "line 2: prompt must be a string" in call(*pair("--data", str(file)), code=2).err
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": "a", "n": 2}])
    assert "a row has one completion" in call(*pair("--data", str(file)), code=2).err


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "--help"],
        ["bench", "throughput", "--help"],
        ["bench", "throughput", "-m", "m"],
        ["bench", "throughput", "--compare", "a.json", "b.json"],
        ["data", "speed-bench", "check", "missing"],
        ["data", "speed-bench", "prepare", "--help"],
        ["eval", "speed-bench", "--help"],
        ["eval", "speed-bench", "--data", "missing", "-m", "m"],
    ],
)
def test_help_and_argument_errors_import_nothing_heavy(argv: list[str]) -> None:
    assert loaded_after(argv) == "[]"


def test_groups_list_and_suggest(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code, text in (
        (["bench", "-h"], 0, "  throughput "),
        (["data", "speed-bench", "-h"], 0, "  prepare "),
        (["bench", "througput"], 2, "Did you mean 'throughput'?"),
    ):
        with pytest.raises(SystemExit) as info:
            run(argv)
        assert info.value.code == code
        caught = capsys.readouterr()
        assert text in caught.out + caught.err
