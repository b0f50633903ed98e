"""Progress: counted in tokens, one line when nobody watches, a file that is always whole."""

import io
import json
import sys
import time
from pathlib import Path

import pytest

from dspark_cli import progress
from dspark_cli.progress import Counts, LoadProgress, Progress, Rate, clock, seconds_left
from engine.telemetry import EngineStats


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_eta_counts_tokens_not_rows() -> None:
    # sentence-transformers#2940, dask#1399: rows a second mislead when rows differ in length
    counts = Counts(total=100, kept=50, done=10, failed=0, in_flight=0)
    assert seconds_left(counts, tokens=1000, rate=100.0) == pytest.approx(40.0)
    counts = Counts(total=100, kept=50, done=10, failed=0, in_flight=20)
    assert seconds_left(counts, tokens=2000, rate=100.0) == pytest.approx(30.0)


def test_eta_is_unknown_without_a_total_or_a_finished_row() -> None:
    assert seconds_left(Counts(total=None, done=5), 100, 10.0) is None
    assert seconds_left(Counts(total=5), 100, 10.0) is None
    assert seconds_left(Counts(total=5, done=1), 100, 0.0) is None


def test_rate_is_of_the_last_seconds() -> None:
    now = 0.0
    rate = Rate(lambda: now)
    for second in range(1, 31):
        now = float(second)
        last = rate.update(100 * second if second <= 15 else 1500 + 10 * (second - 15))
    assert last == pytest.approx(10.0, rel=0.01)
    assert rate.elapsed == 30


def test_clock() -> None:
    assert clock(3723) == "1:02:03"
    assert clock(65) == "1:05"


def stats() -> EngineStats:
    return EngineStats(output_tokens=300, rounds=10, committed=35)


def test_log_line_when_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.05)
    with Progress(Counts(total=10, done=4, failed=1, in_flight=2), stats()):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert lines[0].startswith("dspark: 5/10 rows, 2 in flight, ")
    assert "acceptance length 3.50, 1 failed" in lines[0]


def test_quiet_shows_nothing_but_still_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    path = tmp_path / "state.json"
    with Progress(Counts(total=None), stats(), quiet=True, file=path):
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
    state = json.loads(path.read_text())
    assert state["phase"] == "done"
    assert state["acceptance_length"] == 3.5
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_breaks_says_stopped(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with pytest.raises(KeyError), Progress(Counts(), stats(), quiet=True, file=path):
        raise KeyError
    assert json.loads(path.read_text())["phase"] == "stopped"


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load = LoadProgress(quiet=False)
    load("load", 1 << 20, 4 << 20)
    load.close()
    with Progress(Counts(total=10, done=4), stats()):
        time.sleep(0.3)
    text = terminal.getvalue()
    assert "1.05M/4.19M" in text
    assert "4/10" in text
    assert "acceptance length 3.50" in text


def test_unwritable_progress_file_does_not_stop_a_run(tmp_path: Path) -> None:
    with Progress(Counts(), stats(), quiet=True, file=tmp_path / "no" / "state.json"):
        pass
