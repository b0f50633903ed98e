"""Closed and full standard streams, and Ctrl-C in the first moments: one line and a known code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspark_cli.interrupt import Interrupts, StopNow, held_back
from tests.cli.conftest import Bench, read_lines

ROOT = Path(__file__).parents[2]
ROWS = [{"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(3)]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def shell(redirect: str, *args: str, module: str = "tests.cli.launch") -> tuple[int, str, str]:
    """`dspark args redirect`: exit code, stdout and stderr."""
    script = f'"$@" {redirect}'
    argv = ["bash", "-c", script, "bash", sys.executable, "-m", module, *args]
    done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def generate(bench: Bench, redirect: str, output: str, source: str = "") -> tuple[int, str, str]:
    bench.write(ROWS)
    args = ["-o", output, "-m", str(bench.folder / "m")]
    return shell(redirect, "generate", source or str(bench.input), *args)


@pytest.mark.parametrize(
    ("redirect", "reason"), [(">&-", "it is closed"), (">/dev/full", "No space left on device")]
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_stdout_that_takes_nothing_is_one_error(
    bench: Bench, redirect: str, reason: str, dry_run: bool
) -> None:
    bench.write(ROWS)
    args = ["generate", str(bench.input), "-o", "-", "-m", str(bench.folder / "m"), "-q"]
    code, out, err = shell(redirect, *args, *(["--dry-run"] if dry_run else []))
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == f"error: cannot write to stdout: {reason}"
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full"])
def test_help_that_cannot_be_written_is_an_error(redirect: str) -> None:
    code, _, err = shell(redirect, "--help", module="dspark_cli")
    assert code == 1
    assert err.startswith("error: cannot write to stdout: ")
    assert "Traceback" not in err


def test_closed_stdin_as_input_is_one_error(bench: Bench) -> None:
    code, _, err = generate(bench, "<&-", str(bench.output), "-")
    assert code == 1
    assert "error: cannot read stdin: it is closed\n" in err
    assert "Traceback" not in err
    assert not bench.output.exists()


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_a_file_is_written_whatever_became_of_the_streams(bench: Bench, redirect: str) -> None:
    code, out, err = generate(bench, redirect, str(bench.output))
    assert code == 0, err
    assert out == ""
    assert "Traceback" not in err
    assert [row["id"] for row in bench.rows()] == ["r0", "r1", "r2"]
    # with number 1 or 2 free, the journal would take it, and text would land in it
    assert all("type" in record for record in read_lines(bench.journal.read_bytes()))


def test_an_error_with_closed_stderr_keeps_its_exit_code(bench: Bench) -> None:
    assert generate(bench, "2>&-", str(bench.output), "missing.jsonl")[0] == 2


def test_ctrl_c_in_the_first_moments_is_one_line_and_130(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    args = ["generate", str(bench.input), "-o", str(bench.output), "-m", "demo"]
    argv = [sys.executable, "-c", PROGRAM, *args]
    seen = 0
    for moment in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8):
        process = subprocess.Popen(
            argv, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
        told = [line for line in err.splitlines() if not line.startswith("dspark: no drafter")]
        assert "Traceback" not in err
        if process.returncode != 0:  # the last may find the run ended
            assert process.returncode == 130, (moment, err)
            if "stopping: running rows" in err or "dspark: wrote" in err:
                continue  # on a fast machine the row was running already, or was done
            assert len(told) == 1, (moment, told)
            assert "interrupted" in told[0]
            seen += 1
    assert seen >= 3


def test_a_signal_in_a_destructor_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Python prints what a destructor raises, and goes on as if nobody had pressed Ctrl-C."""

    class Gone:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def work() -> None:
        gone = Gone()
        del gone
        for _ in range(2000):
            time.sleep(0.001)

    with Interrupts(1.0, print), pytest.raises(StopNow):
        work()
    with Interrupts(60.0, lambda _text: None) as first:  # running rows still get their time
        first.running = True
        with first.waiting(), pytest.raises(StopNow):
            work()
        assert (first.draining, first.stopped) == (True, False)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50
    assert capsys.readouterr().err == ""


def test_a_signal_waits_until_libraries_are_loaded() -> None:
    """One that came while triton was imported ended the process with "terminate called"."""
    loaded = []

    def load() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            loaded.append("triton")

    # a process started in the background may have been told to ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load()
        assert loaded
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


PROGRAM = """
import signal, sys
from dspark_cli import start
actual = signal.signal
def told(number, handler):
    result = actual(number, handler)
    if signal.signal is told:
        signal.signal = actual
        print("started", flush=True)
    return result
signal.signal = told
start.run()
"""


def test_ctrl_c_that_an_import_turns_into_another_error_is_still_130(bench: Bench) -> None:
    program = (
        "import os, signal, time\n"
        # a shell starts background jobs with SIGINT ignored, and so may whoever runs the tests
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.cli import fake\n"
        "from dspark_cli import backend, main\n"
        "def load(folder):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(30)\n"
        "    except BaseException as error: raise ImportError('numpy') from error\n"
        "backend.locate_checkpoint = fake.locate\n"
        "backend.load_tokenizer = load\n"
        "main.run()\n"
    )
    bench.write(ROWS)
    args = ["generate", str(bench.input), "-o", str(bench.output), "-m", str(bench.folder / "m")]
    argv = [sys.executable, "-c", program, *args]
    done = subprocess.run(argv, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "error: interrupted"
    assert "ImportError" not in done.stderr
