"""How long the first token took: the parts are the whole."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_cli.progress import Counts, LoadProgress, Progress
from dspark_cli.startup import Startup, process_started
from engine.telemetry import EngineStats
from tests.cli.test_progress import Terminal

SPENT = {"load": 14.0, "warm-up": 3.0, "capture": 2.25, "rest": 0.75}


def test_the_start_of_this_process_is_known() -> None:
    """A process that slept 0.3 s began 0.3 s ago, and its imports before that count too."""
    code = "import time; time.sleep(0.3)\n"
    code += "from dspark_cli.startup import process_started\n"
    code += "print(time.perf_counter() - process_started())"
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(done.stdout) <= time.perf_counter() - begin + 0.02


def test_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stats = EngineStats(seconds={"load": 14.0, "warm-up": 3.0})
    startup = Startup(stats, started=now - 25.0)  # 8 s of them before the engine began
    assert startup.line() is None
    stats.until_first_token = SPENT
    assert startup.line() == (
        "first token 28.0 s after the start: imports and checks 8.0, loading 14.0, warm-up and "
        "capture 5.2, prompt to token 0.8"
    )


def test_it_is_said_once_and_so_is_a_lack_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    stats = EngineStats()
    with Progress(Counts(), stats, startup=Startup(stats, process_started())):
        stats.until_first_token, stats.kv_account = SPENT, "9.00 GiB of 24.00 GiB x ..."
        stats.out_of_memory, stats.max_num_seqs, stats.max_num_batched_tokens = 1, 12, 4096
        time.sleep(0.6)
        stats.out_of_memory = 2
    err = capsys.readouterr().err
    assert err.count("first token ") == 1
    assert err.count("dspark: KV cache 9.00 GiB of 24.00 GiB x ...\n") == 1
    assert err.count("out of memory: going on with at most 12 requests at once and 4096") == 1
    with Progress(Counts(), stats, quiet=True, startup=Startup(stats, process_started())):
        pass
    assert capsys.readouterr().err == ""


def test_a_load_that_takes_a_while_says_its_speed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    progress = LoadProgress(quiet=False)
    for clock[0], done in ((0.0, 1), (4.0, 8 * 10**9)):
        progress("load target", done, 8 * 10**9)
    for clock[0], done in ((4.1, 1), (4.2, 10**9)):
        progress("load draft", done, 10**9)
    progress("warm-up", 0, 1)
    clock[0] = 9.0
    progress("warm-up", 1, 1)
    progress.close()
    assert capsys.readouterr().err == "dspark: load target: 8.00 GB in 4.0 s, 2.00 GB/s\n"


def test_generate_says_it(tmp_path: Path) -> None:
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "max_tokens": 2}\n')
    args = ["generate", str(rows), "-o", str(tmp_path / "o.jsonl"), "--model", "demo"]
    args += ["--device", "cpu", "--threads", "1", "--verify", "all"]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dspark_cli", *args], capture_output=True, text=True, check=True
    )
    wall = time.perf_counter() - begin
    found = re.search(
        r"first token ([\d.]+) s after the start: imports and checks ([\d.]+), loading ([\d.]+), "
        r"warm-up and capture ([\d.]+), prompt to token ([\d.]+)\n",
        done.stderr,
    )
    assert found is not None, done.stderr
    total, *parts = map(float, found.groups())
    assert 0 < total <= wall + 0.1
    assert abs(total - sum(parts)) < 0.21  # each is rounded


def test_on_a_terminal_it_goes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    stats = EngineStats(until_first_token=SPENT)
    with Progress(Counts(total=4), stats, startup=Startup(stats, process_started())):
        time.sleep(0.6)
    lines = terminal.getvalue().replace("\r", "\n").splitlines()
    (line,) = [line for line in lines if "first token" in line]
    assert line.startswith("dspark: first token ")
