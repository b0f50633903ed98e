"""`dspark bench` on random weights: a shape small enough for a test, through the real engine."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dspark_cli import bench_round
from dspark_cli.main import run
from engine.measure import RoundTimes
from engine.models import shapes
from tests.cli.conftest import Result

Call = Callable[..., Result]
SHAPE = ("-m", "shape:tiny", "--device", "cpu", "--dtype", "float32", "--threads", "1")


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> Call:
    known = shapes.target_shape("shape:qwen3-4b")
    layers = replace(
        known.layers, num_layers=8, hidden_size=32, intermediate_size=48, num_heads=2, head_dim=16
    )
    layers = replace(layers, num_kv_heads=1)
    tiny = replace(known, layers=layers, vocab_size=2000, eos_token_ids=(7,), max_position=512)
    monkeypatch.setitem(shapes._TARGETS, "tiny", tiny)
    monkeypatch.chdir(tmp_path)

    def bench(*args: str, code: int = 0) -> Result:
        with pytest.raises(SystemExit) as info:
            run(["bench", *args])
        out, err = capsysbinary.readouterr()
        result = Result(int(info.value.code or 0), out, err.decode())
        assert result.code == code, result.err
        return result

    return bench


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("--rounds", "4000"), "a context of 32"),
        (("--prompt-tokens", "5000"), "a context of 5"),
        (("--rounds", "2", "--kv-cache-memory", "64K"), "one request of a context of"),
        (("--rounds", "2", "--kv-cache-memory", "800K"), "of 4 requests some end before"),
    ],
)
def test_what_does_not_fit_is_told_in_the_commands_own_options(
    call: Call, given: tuple[str, ...], text: str
) -> None:
    """The hints named --max-model-len, which it has not, and bytes that did not help."""
    err = call("round", *SHAPE, "--requests", "4", *given, code=2).err
    assert text in err
    assert "hint: use fewer --rounds, a smaller --prompt-tokens, or a larger --kv-cache-" in err
    assert "--max-model-len" not in err


@pytest.mark.parametrize("command", ["round", "kernels", "collectives", "collapse"])
def test_a_report_that_cannot_be_written_is_told_before_anything_is_measured(
    call: Call, command: str
) -> None:
    """It was told after it, with a traceback's name for a message."""
    where = () if command == "collapse" else ("-m", "shape:tiny")
    done = call(command, *where, "--output-json", "nowhere/x.json", code=2)
    assert "error: there is no folder nowhere" in done.err
    assert not done.out


def test_more_cannot_be_accepted_than_is_drafted(call: Call) -> None:
    err = call("round", *SHAPE, "--requests", "1", "--synthetic-acceptance", "99", code=2).err
    assert "--synthetic-acceptance 99: a round commits 8 tokens at most" in err


def test_rounds_and_plain_steps_against_their_products(call: Call) -> None:
    sizes = ("--requests", "2,1", "--rounds", "4", "--prompt-tokens", "9")
    done = call("round", *SHAPE, *sizes, "--synthetic-acceptance", "3", "--output-json", "r.json")
    rows = [line.split("|")[1:4] for line in done.out.decode().splitlines()[2:6]]
    assert [(row[0].strip(), row[1].strip()) for row in rows] == [
        ("1", "round"),
        ("1", "plain"),
        ("2", "round"),
        ("2", "plain"),
    ]
    assert "synthetic_acceptance 3.0" in done.out.decode().splitlines()[-1]
    body = json.loads(Path("r.json").read_text())
    for row in body["rounds"]:
        assert row["wall"] > 0
        assert row["ratio"] == pytest.approx(row["wall"] / row["floor"])
        assert row["torch_floor"] >= row["floor"]
        assert row["committed"] == 1 if not row["speculating"] else 1 <= row["committed"] <= 8


def test_made_up_acceptance_is_said_wherever_a_number_is(call: Call) -> None:
    given = ("--data", "random", "--input-len", "9", "--output-len", "24", "--ignore-eos")
    given += ("--max-num-seqs", "1,2", "--num-prompts", "4", "--pairs", "1")
    done = call("throughput", *SHAPE, *given, "--synthetic-acceptance", "3.5", "--out", "made")
    note = "--synthetic-acceptance 3.5: acceptance is made up"
    assert "; acceptance length made up, 3.5" in done.err
    assert f"note: {note}" in done.err
    assert "bug" not in done.err  # drafted texts differ from plain ones, as they must
    body = json.loads(Path("made/summary.json").read_text())
    assert any(note in warning for warning in body["warnings"])
    assert note in Path("made/report.html").read_text()
    assert body["settings"]["synthetic_acceptance"] == 3.5
    assert body["settings"]["model_digest"] == body["settings"]["draft_digest"] == "shape:tiny"
    for point in body["points"]:
        length = point["drafted"]["acceptance"]["acceptance_length"]
        assert 2.5 < length < 4.5  # 4 requests of 24 tokens, the last round of each cut
        assert point["plain"]["acceptance"] is None
    alone = call("throughput", *SHAPE, *given, "--draft", "none", "--output-json", "plain.json")
    assert "no drafter: nothing to compare" in alone.err
    other = call("throughput", "--compare", "made", "plain.json", code=2)
    assert "draft: 'shape:tiny' in A, None in B" in other.err or "draft-digest" in other.err


def test_random_weights_have_no_text(call: Call) -> None:
    for given in (("--data", "random"), ("--data", "demo", "--ignore-eos")):
        done = call("throughput", *SHAPE, *given, code=2)
        assert done.err.startswith("error: random weights know no text and no end of it\nhint: add")


def test_a_floor_of_bytes_has_nothing_of_torch() -> None:
    """It stood in torch's column as well."""
    times = dict.fromkeys((f.name for f in fields(RoundTimes)), 1.0)
    row = RoundTimes(**{**times, "num_reqs": 4, "torch_floor": None})  # type: ignore[arg-type]
    header = bench_round._HEADER.splitlines()[0].split("|")
    cells = bench_round._row(row).split("|")
    assert len(cells) == len(header)
    assert cells[header.index(" torch's floor ")].strip() == "-"
