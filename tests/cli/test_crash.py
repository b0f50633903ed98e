"""Kills, signals and full disks: what was finished is never lost, and the user is told."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dspark_cli import backend
from dspark_cli import journal as journal_module
from dspark_cli import output as output_module
from engine.errors import DSparkError
from tests.cli import fake
from tests.cli.conftest import Bench, read_lines

ROOT = Path(__file__).parents[2]
ROWS = [{"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(40)]


class Process:
    """`dspark generate` as a process of its own."""

    def __init__(self, bench: Bench, *args: str, delay: float = 0.01, stdin: int | None = None):
        argv = [sys.executable, "-m", "tests.cli.launch", "generate"]
        source = "-" if stdin is not None else str(bench.input)
        argv += [source, "-o", str(bench.output), "-m", str(bench.folder / "m"), *args]
        env = {**os.environ, "FAKE_DELAY": str(delay), "PYTHONPATH": str(ROOT)}
        self.bench = bench
        self.popen = subprocess.Popen(argv, cwd=ROOT, env=env, stderr=subprocess.PIPE, stdin=stdin)

    def wait_for_rows(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if self.bench.journal.exists():
                lines = self.bench.journal.read_bytes().count(b"\n")
                if lines > count:
                    return
            assert self.popen.poll() is None, self.end()
            time.sleep(0.005)
        raise AssertionError("no rows")

    def end(self, timeout: float = 30) -> tuple[int, str]:
        err = self.popen.communicate(timeout=timeout)[1]
        return self.popen.returncode, err.decode()


@pytest.fixture
def clean(bench: Bench) -> bytes:
    """What an undisturbed run writes."""
    bench.write(ROWS)
    bench.generate("--draft", "none")
    data = bench.output.read_bytes()
    bench.output.unlink()
    bench.journal.unlink()
    return data


def test_kill_9_at_random_moments_then_resume_is_one_clean_run(bench: Bench, clean: bytes) -> None:
    moments = random.Random(0)
    kills = 0
    for _ in range(12):
        process = Process(bench, "--max-num-seqs", "2", delay=0.02)
        try:
            process.end(timeout=0.3 + 0.4 * moments.random())
            break
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.end()
            kills += 1
    assert kills >= 2
    bench.generate("--draft", "none")
    assert bench.output.read_bytes() == clean
    records = [json.loads(line) for line in bench.journal.read_bytes().splitlines()]
    done = [record["row"]["id"] for record in records if record["type"] == "row"]
    assert sorted(done) == sorted(row["id"] for row in ROWS)  # no row was paid for twice


def test_first_ctrl_c_lets_running_rows_end(bench: Bench, clean: bytes) -> None:
    process = Process(bench, "--max-num-seqs", "4", delay=0.05)
    process.wait_for_rows(3)
    process.popen.send_signal(signal.SIGINT)
    code, text = process.end()
    assert code == 130
    assert "running rows get 10 s to end" in text
    assert "run the same command again" in text
    assert not bench.output.exists()
    bench.generate("--draft", "none")
    assert bench.output.read_bytes() == clean


def test_sigterm_drains_too(bench: Bench, clean: bytes) -> None:
    process = Process(bench, delay=0.05)
    process.wait_for_rows(2)
    process.popen.terminate()
    assert process.end()[0] == 130


def test_second_ctrl_c_stops_at_once_and_keeps_what_ended(bench: Bench, clean: bytes) -> None:
    process = Process(bench, "--max-num-seqs", "16", delay=1.0)
    process.wait_for_rows(1)
    process.popen.send_signal(signal.SIGINT)
    time.sleep(0.2)
    started = time.monotonic()
    process.popen.send_signal(signal.SIGINT)
    code, text = process.end()
    assert code == 130
    assert time.monotonic() - started < 2.5
    assert "run the same command again" in text
    assert len(read_lines(bench.journal.read_bytes())) >= 2
    bench.generate("--draft", "none")
    assert bench.output.read_bytes() == clean


def test_grace_ends_the_drain(bench: Bench, clean: bytes) -> None:
    process = Process(bench, "--max-num-seqs", "16", "--grace", "0.1", delay=1.0)
    process.wait_for_rows(1)
    started = time.monotonic()
    process.popen.send_signal(signal.SIGINT)
    assert process.end()[0] == 130
    assert time.monotonic() - started < 2.5


def test_ctrl_c_while_stdin_is_silent(bench: Bench, clean: bytes) -> None:
    process = Process(bench, "--max-num-seqs", "2", stdin=subprocess.PIPE)
    assert process.popen.stdin is not None
    process.popen.stdin.write(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:3]))
    process.popen.stdin.flush()
    process.wait_for_rows(0)
    time.sleep(0.8)  # it waits for a fourth row now
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(timeout=30) == 130
    text = process.end()[1]
    done = [line for line in read_lines(bench.journal.read_bytes()) if line["type"] == "row"]
    assert len(done) == 3, text


def test_signal_after_the_last_row_was_admitted_still_gives_the_output(
    bench: Bench, clean: bytes
) -> None:
    process = Process(bench, "--max-num-seqs", "64", delay=0.2)
    process.wait_for_rows(1)
    process.popen.send_signal(signal.SIGINT)
    code, text = process.end()
    assert code == 0, text
    assert bench.output.read_bytes() == clean


def test_another_run_on_the_same_output_is_refused(bench: Bench, clean: bytes) -> None:
    process = Process(bench, delay=0.05)
    process.wait_for_rows(1)
    assert "another run" in bench.generate("--draft", "none", code=2).err
    assert process.end()[0] == 0
    assert bench.output.read_bytes() == clean


def test_full_disk_is_one_error_and_the_journal_stays_valid(
    bench: Bench, clean: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0

    def write(fd: int, data: memoryview) -> int:
        nonlocal written
        if written > 3000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += os.write(fd, data[: max(1, len(data) // 2)])  # a full disk takes half a line
        return max(1, len(data) // 2)

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_write", write)
        result = bench.generate("--draft", "none", code=1)
    assert result.err.count("error:") == 1
    assert "No space left on device" in result.err
    assert "hint: free some space" in result.err
    lines = read_lines(bench.journal.read_bytes())
    assert 1 < len(lines) < 40
    bench.generate("--draft", "none")
    assert bench.output.read_bytes() == clean


def test_full_disk_at_the_end_leaves_no_half_output(
    bench: Bench, clean: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(output_module.os, "fsync", fsync)
        patch.setattr(Journal := journal_module.Journal, "sync", lambda self: None)
        patch.setattr(Journal, "close", lambda self: os.close(self._fd))
        result = bench.generate("--draft", "none", code=1)
    assert "Input/output error" in result.err
    assert not bench.output.exists()
    assert not list(bench.folder.glob(".*"))
    bench.generate("--draft", "none")
    assert bench.output.read_bytes() == clean
    assert fake.FakeEngine.loads == 2  # the clean run and the broken one: nothing decoded again


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "missing/out.jsonl"], "no folder"),
        (["-o", "m"], "is a folder"),
        (["-o", "in.jsonl"], "both input and output"),
        (["-o", "/dev/null"], "not an ordinary file"),
        (["-o", "out.jsonl.gz"], "only JSONL"),
        (["-o", "out.jsonl", "--metrics-json", "out.jsonl"], "written twice"),
        (["-o", "out.jsonl", "--metrics-json", "no/m.json"], "no folder"),
        ([], "no --output"),
        (["-o", "out.jsonl", "--compare-plain"], "needs a drafter"),
        (["-o", "out.jsonl", "-g", "3"], "no draft"),
        (["-o", "out.jsonl", "--chat-template-kwargs", "{"], "--chat-template-kwargs"),
        (["-o", "out.jsonl", "--model", "nowhere"], "no such checkpoint"),
        (["-o", "-", "--rerun", "failed"], "keeps no journal"),
    ],
)
def test_bad_places_and_options_are_refused_before_loading(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(bench.folder)
    bench.write(ROWS)
    before = sorted(bench.folder.iterdir())
    result = bench.call("generate", "in.jsonl", "-m", "m", *args)
    assert result.code == 2, result.err
    assert message in result.err
    assert result.err.count("error:") == 1
    assert fake.FakeEngine.loads == 0
    assert sorted(bench.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("in.jsonl", b"", "no rows"),
        ("in.jsonl", b"\n \n", "no rows"),
        ("in.json", b'[{"prompt": "a"}]', "one JSON array"),
        ("in.parquet", b"PAR0", "cannot read"),
        ("in.jsonl.gz", b'{"prompt": "a"}\n', "cannot read"),
    ],
)
def test_bad_inputs_are_refused_before_loading(
    bench: Bench, name: str, data: bytes, message: str
) -> None:
    path = bench.folder / name
    path.write_bytes(data)
    result = bench.generate(source=str(path), code=2)
    assert message in result.err
    assert fake.FakeEngine.loads == 0


def test_missing_input_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such input" in bench.generate(source=str(bench.folder / "x"), code=2).err
    empty = bench.folder / "empty"
    empty.mkdir()
    assert "holds no rows" in bench.generate(source=str(empty), code=2).err


def test_read_only_folder_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(self: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    bench.write(ROWS)
    monkeypatch.setattr(Path, "touch", touch)  # root may write anywhere: chmod proves nothing
    result = bench.generate(code=2)
    assert "Read-only file system" in result.err
    assert fake.FakeEngine.loads == 0


def test_link_to_the_output_stays_a_link(bench: Bench) -> None:
    real = bench.folder / "real.jsonl"
    real.write_text("")
    bench.output.symlink_to(real)
    bench.write(ROWS)
    bench.generate("--overwrite")
    assert bench.output.is_symlink()
    assert len(read_lines(real.read_bytes())) == 40


def test_next_to_no_space_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspark_cli import preflight

    bench.write(ROWS)
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: usage)
    assert "only 1 MiB free" in bench.generate(code=2).err
    usage.free = 20 << 20  # type: ignore[attr-defined]
    assert "at full length the rows need" in bench.generate("--max-tokens", "100000").err


def test_ctrl_c_while_loading_on_a_resume_counts_what_the_journal_has(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # was: 0 of 60 lines are done
    bench.write(ROWS)
    bench.generate()
    new = [{"id": f"new{at}", "prompt": "new"} for at in range(20)]
    bench.write([*new, *ROWS])

    def load(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    metrics = bench.folder / "metrics.json"
    with monkeypatch.context() as patch:
        patch.setattr(backend, "load_engine", load)
        text = bench.generate("--metrics-json", str(metrics), code=130).err
    assert "40 lines of this and earlier runs are kept in" in text
    assert "(the input asks for 60)" in text
    assert "0 of 60" not in text
    assert json.loads(metrics.read_text())["phase"] == "interrupted"
    bench.generate()
    assert len(bench.rows()) == 60


def test_ctrl_c_while_the_journal_is_read_is_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(ROWS)
    bench.generate()
    monkeypatch.setattr(
        journal_module.Journal, "_load", lambda self: os.kill(os.getpid(), signal.SIGINT)
    )
    assert bench.generate(code=130).err.endswith("error: interrupted\n")


def test_metrics_of_an_interrupted_run_say_so(bench: Bench, clean: bytes) -> None:
    metrics = bench.folder / "metrics.json"
    process = Process(bench, "--metrics-json", str(metrics), "--max-num-seqs", "2", delay=0.05)
    process.wait_for_rows(3)
    process.popen.send_signal(signal.SIGINT)
    assert process.end()[0] == 130
    found = json.loads(metrics.read_text())
    assert found["phase"] == "interrupted"
    assert 3 <= found["rows"]["done"] < 40
    assert found["speed"]["seconds"] > 0
    assert found["manifest"]["settings"]["max_num_seqs"] == 2


def test_metrics_of_a_run_that_failed_say_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no file, although half of the rows had been paid for."""
    bench.write(ROWS)
    metrics = bench.folder / "metrics.json"
    add = fake.FakeEngine.run

    def failing(self: Any, *args: Any, **more: Any) -> Any:
        for count, done in enumerate(add(self, *args, **more)):
            if count == 7:
                raise DSparkError("the device is gone", "look for it")
            yield done

    with monkeypatch.context() as patch:
        patch.setattr(fake.FakeEngine, "run", failing)
        text = bench.generate("--metrics-json", str(metrics), code=1).err
    assert "the device is gone" in text
    assert "look for it; finished rows are kept: run the same command again" in text
    found = json.loads(metrics.read_text())
    assert found["phase"] == "failed"
    assert found["rows"]["done"] == 7
    assert (found["error"]["error"], found["error"]["exit_code"]) == ("the device is gone", 1)
    bench.generate("--metrics-json", str(metrics))
    done = metrics.read_text()
    assert json.loads(done)["phase"] == "done"
    # nothing is left to do: the figures of the run that did it stay
    text = bench.generate("--metrics-json", str(metrics)).err
    assert f"nothing was decoded: {metrics} is left as it is" in text
    assert metrics.read_text() == done
