"""`dspark bench kernels`: a table on stdout, numbers as JSON, exit code 1 for a wrong op."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark_cli.main import run
from engine.kernel_bench import layer_cases, timing

SMALL = ("--context", "8", "--long-context", "8", "--prefill-tokens", "64", "--requests", "2")


@pytest.fixture
def kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0.0)  # three calls of each op are enough

    def call(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        common = ("--model", "demo", "--device", "cpu", "--threads", "1")
        with pytest.raises(SystemExit) as info:
            run(["bench", "kernels", *common, *SMALL, *args])
        return (int(info.value.code or 0), *capsys.readouterr())

    return call


def cells(out: str) -> list[list[str]]:
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def test_table_and_json(kernels: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = kernels("--output-json", str(tmp_path / "k.json"))
    assert code == 0
    head, *rows = cells(out)
    assert head == ["op", "shape", "us", "GB/s", "TFLOP/s", "of the ceiling"]
    assert all(float(row[2]) > 0 for row in rows)
    assert all(row[5].endswith(("% copy", "% matmul")) for row in rows)
    assert "a CPU has no kernels" in err
    found: dict[str, Any] = json.loads((tmp_path / "k.json").read_text())
    assert [[m["op"], m["shape"]] for m in found["ops"]] == [row[:2] for row in rows]
    assert found["about"]["dtype"] == "float32"
    assert float(found["about"]["copy GB/s"]) > 0


def test_a_wrong_op_is_said_and_not_timed(
    kernels: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layer_cases.silu_mul
    monkeypatch.setattr(layer_cases, "silu_mul", lambda x: real(x) * 1.01)
    code, out, err = kernels("--ops", "silu_mul,sample")
    assert code == 1
    rows = {row[0]: row for row in cells(out)[1:]}
    assert rows["silu_mul"][2].startswith("WRONG: out is off by ")
    assert float(rows["sample"][2]) > 0
    assert "wrong, and not timed: silu_mul" in err


def test_bad_names_are_usage_errors(kernels: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = kernels("--ops", "silu_mul,sofmax")
    assert code == 2
    assert not out  # half a table
    assert "copy GB/s" not in err  # and nothing has been measured
    assert "no op 'sofmax'" in err
    assert "silu_mul" in err.split("hint:")[1]
    assert kernels("--requests", "0")[0] == 2
