"""A GPU that fills up during a run: one line about it, the same output, and nothing lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_cli import backend
from dspark_cli.main import run
from engine import Engine


@pytest.fixture
def generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`dspark generate` on the demo pair, with rounds that fail at given calls."""
    rows = [{"prompt": f"{i} + {i} =", "max_tokens": 4 + 6 * i} for i in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = backend.load_engine

    def call(out: Path, fails: Callable[[int], bool]) -> tuple[int, str]:
        def load_engine(*args: Any) -> Engine:
            engine = load(*args)
            real, calls = engine.runner.steps.verify, [0]

            def verify(*rest: Any, **flags: Any) -> torch.Tensor:
                calls[0] += 1
                if fails(calls[0]):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\n")
                return real(*rest, **flags)

            engine.runner.steps.verify = verify  # type: ignore[method-assign]
            return engine

        monkeypatch.setattr(backend, "load_engine", load_engine)
        capsys.readouterr()
        args = ["generate", str(tmp_path / "in.jsonl"), "-o", str(out), "--model", "demo"]
        args += ["--verify", "all"]  # rounds of the run only: none to measure what they cost
        with pytest.raises(SystemExit) as info:
            run([*args, "--device", "cpu", "--threads", "1", "--ignore-eos"])
        return int(info.value.code or 0), capsys.readouterr().err

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_shortage_is_told_once_and_changes_nothing(
    tmp_path: Path, generate: Callable[..., tuple[int, str]]
) -> None:
    assert generate(tmp_path / "a.jsonl", lambda n: False)[0] == 0
    code, err = generate(tmp_path / "b.jsonl", lambda n: n in (2, 4))
    assert code == 0
    assert err.count("out of memory: going on with at most ") == 1
    assert "2 steps ran out of memory; at most 1 requests at once fitted in the end" in err
    texts = [
        [(row["id"], row["token_ids"]) for row in lines(tmp_path / name)]
        for name in ("a.jsonl", "b.jsonl")
    ]
    assert len(texts[0]) == 6
    assert texts[0] == texts[1]


def test_a_row_that_does_not_fit_alone_is_exit_1_and_finished_rows_are_kept(
    tmp_path: Path, generate: Callable[..., tuple[int, str]]
) -> None:
    out = tmp_path / "o.jsonl"
    code, err = generate(out, lambda n: n >= 6)
    assert code == 1
    assert "error: request '" in err
    assert "does not fit into memory even alone" in err
    assert "hint: use a smaller --gpu-memory-utilization" in err
    kept = [record for record in lines(tmp_path / "o.journal") if record["type"] == "row"]
    code, err = generate(out, lambda n: False)
    assert code == 0
    assert f"{len(kept)} lines were done before" in err
    assert len(kept) > 0
    assert len(out.read_text().splitlines()) == 6
