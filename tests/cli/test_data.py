"""`dspark data speed-bench`, and `dspark eval speed-bench` on the timed engine."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dspark_cli import backend
from dspark_cli.eval_speed_bench import SpeedBenchOptions, SpeedBenchRun
from dspark_cli.main import run
from engine.errors import ConfigError
from tests.cli import fake
from tests.cli.conftest import Result, make_checkpoints
from tests.helpers.speed_bench import ROWS, as_messages, layouts, placeholder, write_lines
from tests.helpers.timed_engine import TimedEngine

Call = Callable[..., Result]
HLE = placeholder(9, "https://huggingface.co/datasets/cais/hle", "h1")


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Call:
    make_checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "locate_checkpoint", fake.locate)
    monkeypatch.setattr(backend, "load_engine", partial(TimedEngine, real_time=True))

    def command(*args: str, code: int = 0) -> Result:
        with pytest.raises(SystemExit) as info:
            run(list(args))
        out, err = capsysbinary.readouterr()
        result = Result(int(info.value.code or 0), out, err.decode())
        assert result.code == code, result.err
        return result

    return command


def play(data: str, *rest: str) -> tuple[str, ...]:
    return ("eval", "speed-bench", "--data", data, "-m", "m", "-d", "d", *rest)


@pytest.mark.parametrize("layout", list(layouts()))
def test_check_tells_the_layout(layout: str, call: Call, tmp_path: Path) -> None:
    rows = [*ROWS, HLE] if layout == "hub" else ROWS
    path = layouts()[layout](tmp_path / "data", rows)
    done = call("data", "speed-bench", "check", str(path), code=3 if layout == "hub" else 0)
    text = done.out.decode()
    assert f"layout        {layout}:" in text
    assert f"rows          {len(rows)}" in text


def test_check_lists_sources_and_their_terms(call: Call, tmp_path: Path) -> None:
    other = placeholder(10, "TIGER-Lab/MMLU-Pro", "m(1,2)")
    file = write_lines(tmp_path / "qualitative.jsonl", [*ROWS, HLE, other])
    text = call("data", "speed-bench", "check", str(file), code=3).out.decode()
    assert "placeholders  2" in text
    assert "hle: 1 rows\n    fill: --source hle=FILE, the test split (id, question)" in text
    assert "gated: accept its terms on the Hub and log in" in text
    assert "mmlu-pro: 1 rows\n    fill: its prompts are worded by the official script" in text
    assert "NVIDIA Evaluation Dataset License" in text


def test_prepare_fills_and_says_what_is_left(call: Call, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "qualitative.jsonl", [*ROWS, HLE])
    args = ("data", "speed-bench", "prepare", str(file), "-o", "full.jsonl")
    done = call(*args, code=3)
    assert "1 rows left out (id-9): hle: no --source hle=FILE" in done.err
    assert "4 of 5 rows, subset qualitative-no-hle-4of5" in done.err
    assert "exists" in call(*args, code=2).err
    write_lines(tmp_path / "hle.jsonl", [{"id": "h1", "question": "How far?"}])
    done = call(*args, "--source", "hle=hle.jsonl", "--overwrite")
    assert "1 rows filled from hle" in done.err
    assert "5 of 5 rows, subset qualitative\n" in done.err
    assert "layout        sglang" in call("data", "speed-bench", "check", "full.jsonl").out.decode()


def test_nothing_to_write_is_not_written(call: Call, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "qualitative.jsonl", [HLE])
    done = call("data", "speed-bench", "prepare", str(file), "-o", "full.jsonl", code=3)
    assert "full.jsonl was not written" in done.err
    assert not (tmp_path / "full.jsonl").exists()


def test_a_placeholder_is_refused_with_the_command_that_fills_it(
    call: Call, tmp_path: Path
) -> None:
    file = write_lines(tmp_path / "qualitative.jsonl", [*ROWS, HLE])
    done = call(*play(str(file)), code=2)
    assert "1 of 5 rows of qualitative are placeholders (first: row 5" in done.err
    assert f"dspark data speed-bench prepare {file} -o qualitative.jsonl" in done.err
    done = call(*play(str(file), "--clean-subset", "--out", "r"))
    body = json.loads(Path("r/summary.json").read_text())
    assert body["subset"] == "qualitative-no-hle-4of5"
    for line in Path("r/matrix.csv").read_text().splitlines()[1:]:
        assert line.startswith("qualitative-no-hle-4of5,all,")
    for line in Path("r/per_request.jsonl").read_text().splitlines():
        assert json.loads(line)["subset"] == "qualitative-no-hle-4of5"
    assert "SPEED-Bench: qualitative-no-hle-4of5" in Path("r/report.html").read_text()


def test_a_run_reports_by_category_and_turn(call: Call, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "qualitative.jsonl", as_messages(ROWS))
    done = call(*play(str(file), "--out", "r", "--max-num-seqs", "2"))
    body = json.loads(Path("r/summary.json").read_text())
    assert {name: group["turns"] for name, group in body["by_category"].items()} == {
        "coding": 3,
        "math": 3,
        "roleplay": 1,
    }
    assert {name: g["turns"] for name, g in body["by_turn"].items()} == {
        "turn 1": 4,
        "turn 2": 2,
        "turn 3": 1,
    }
    assert body["turns_played"] == "all"
    assert body["all"]["acceptance"]["rounds"] > 0
    assert "| qualitative (all turns) |" in done.err
    text = "".join(p.read_text() for p in Path("r").iterdir())
    for row in ROWS:  # the data set is not ours to pass on
        assert row["turns"][0] not in text


def test_tiers_of_a_throughput_config(call: Call, tmp_path: Path) -> None:
    rows = [dict(row, category=t) for row, t in zip(ROWS, ["mixed", "low_entropy"], strict=False)]
    file = write_lines(tmp_path / "throughput_1k.jsonl", rows)
    call(*play(str(file), "--first-turn-only", "--out", "r"))
    body = json.loads(Path("r/summary.json").read_text())
    assert list(body["by_tier"]) == ["low_entropy", "mixed"]
    assert body["turns_played"] == "first"


def test_failed_turns_give_exit_code_3(call: Call, tmp_path: Path) -> None:
    rows = [dict(ROWS[0], turns=["FAIL", "never asked"]), *ROWS[1:]]
    file = write_lines(tmp_path / "qualitative.jsonl", rows)
    done = call(*play(str(file), "--out", "r"), code=3)
    assert "1 turns were not played" in done.err
    body = json.loads(Path("r/summary.json").read_text())
    assert body["by_category"]["coding"]["errors"] == {"too_long": 1}


def test_first_turn_layouts_say_so(call: Call, tmp_path: Path) -> None:
    folder = layouts()["speculators"](tmp_path / "data", ROWS)
    done = call(*play(str(folder)))
    assert "the layout speculators holds first turns only" in done.err
    assert "| qualitative (first turns) |" in done.err


def test_bad_options_are_refused_before_loading(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "qualitative.jsonl", ROWS)
    with pytest.raises(ConfigError, match="is for --out"):
        SpeedBenchRun(SpeedBenchOptions(data=file, model="m", overwrite=True))


def test_every_option_is_documented() -> None:
    for hint in SpeedBenchOptions.__annotations__.values():
        assert hint.__metadata__[0].help
