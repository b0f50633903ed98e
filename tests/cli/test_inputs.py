"""Inputs that are no plain file, and outputs that would become input."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dspark_cli.reader import takes_in
from tests.cli import fake
from tests.cli.conftest import Bench

ROOT = Path(__file__).parents[2]
ROWS = [{"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(12)]
DATA = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
IDS = [row["id"] for row in ROWS]


def shell(bench: Bench, script: str) -> str:
    """A bash script in which "$@" is the command without INPUT; its stderr."""
    bench.write(ROWS)
    command = [sys.executable, "-m", "tests.cli.launch", "generate"]
    options = ["-o", str(bench.output), "-m", str(bench.folder / "m")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "INPUT": str(bench.input)}
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command, *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.decode()


@pytest.mark.parametrize(
    "script",
    ['"$@" <(cat "$INPUT")', 'cat "$INPUT" | "$@" /dev/stdin', '"$@" /dev/stdin <"$INPUT"'],
)
def test_a_pipe_by_name_is_read_once(bench: Bench, script: str) -> None:
    # the pass that counts rows ate them: "no rows", or a hang
    shell(bench, script)
    assert [row["id"] for row in bench.rows()] == IDS


@pytest.mark.parametrize("name", ["rows", "rows.jsonl", "rows.json"])
def test_a_fifo_is_read_once(bench: Bench, name: str) -> None:
    fifo = bench.folder / name
    os.mkfifo(fifo)
    writer = threading.Thread(target=fifo.write_bytes, args=(DATA,), daemon=True)
    writer.start()
    bench.generate(source=str(fifo))
    writer.join(timeout=10)
    assert [row["id"] for row in bench.rows()] == IDS


def test_a_pipe_is_resumed_by_giving_it_again(bench: Bench) -> None:
    for _ in range(2):
        shell(bench, '"$@" <(cat "$INPUT")')
    assert [row["id"] for row in bench.rows()] == IDS
    assert len(bench.journal.read_bytes().splitlines()) == 1 + len(ROWS)


@pytest.mark.parametrize("output", ["out.jsonl", "out", "out.json"])
@pytest.mark.parametrize("pattern", [".", "*.json*", "**/*.json*"])
def test_output_among_the_input_is_refused_the_first_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, output: str, pattern: str
) -> None:
    # the first run worked; the second refused, or would have read the output as rows
    folder = bench.folder / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(DATA)
    monkeypatch.chdir(folder)
    model = str(bench.folder / "m")
    result = bench.call("generate", pattern, "-o", output, "-m", model)
    assert result.code == 2
    assert "would lie among the rows of" in result.err
    assert sorted(p.name for p in folder.iterdir()) == ["a.jsonl"]
    assert fake.FakeEngine.loads == 0
    for _ in range(2):  # elsewhere, both runs work
        assert bench.call("generate", pattern, "-o", f"../{output}", "-m", model).code == 0


def test_reports_among_the_input_are_refused_too(bench: Bench) -> None:
    folder = bench.folder / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(DATA)
    args = ["--metrics-json", str(folder / "metrics.json")]
    assert "would lie among" in bench.generate(*args, source=str(folder), code=2).err


@pytest.mark.parametrize(
    ("pattern", "path", "taken"),
    [
        ("*.jsonl", "out.jsonl", True),
        ("*.jsonl", "out.journal", False),
        ("*.jsonl", "deeper/out.jsonl", False),
        ("*", "out.journal", True),
        ("*", ".out", False),
        (".*", ".out", True),
        ("**/*.jsonl", "out.jsonl", True),
        ("**/*.jsonl", "a/b/out.jsonl", True),
        ("**/*.jsonl", "a/.b/out.jsonl", False),
        ("part-[0-9].jsonl", "part-3.jsonl", True),
        ("part-[0-9].jsonl", "out.jsonl", False),
        ("./a/../*.jsonl", "out.jsonl", True),
        ("-", "out.jsonl", False),
    ],
)
def test_globs_take_in_what_they_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, path: str, taken: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    assert takes_in(pattern, Path(path)) is taken
