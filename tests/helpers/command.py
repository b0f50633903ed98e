"""The `dspark` command as a test needs it: in this process, or in one that can be killed.

Importing torch costs more than most commands do. A process to be killed is forked from a server
that has imported it already, and runs the command from its first line on.
"""

import atexit
import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark_cli.main import run
from tests.helpers.distributed import preload


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run_command(*args: str, cwd: Path) -> Done:
    """Run the command here, in folder `cwd`; it may not start other ranks."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code, threads = 0, torch.get_num_threads()
    try:
        with chdir(cwd), redirect_stdout(out), redirect_stderr(err):
            run(list(args))
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        torch.set_num_threads(threads)
    return Done(code, *(_written(stream) for stream in (out, err)))


def _written(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


class Command:
    """The command in a process of its own; stdout is dropped. A context manager: it ends there.

    Args:
        args: Its arguments.
        cwd: Its folder.
        before: A module-level function to call first.
    """

    def __init__(self, *args: str, cwd: Path, before: Callable[[], None] | None = None) -> None:
        preload()
        handle, self._err = tempfile.mkstemp(dir=cwd, suffix=".err")
        os.close(handle)
        given = (args, str(cwd), self._err, before)
        self._process = multiprocessing.get_context("forkserver").Process(target=_main, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        Path(self._err).unlink()

    @property
    def stderr(self) -> str:
        """What it has said so far."""
        return Path(self._err).read_text("utf-8")

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Wait for its end; returns the exit code.

        Raises:
            TimeoutError: It still runs.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"still running after {timeout} s: {self.stderr}")
        return code


def run_forked(*args: str, cwd: Path, before: Callable[[], None] | None = None) -> Done:
    """Run the command in a process of its own to the end, within a minute and a half."""
    with Command(*args, cwd=cwd, before=before) as command:
        code = command.wait(90)
        return Done(code, "", command.stderr)


def _main(args: tuple[str, ...], cwd: str, err: str, before: Callable[[], None] | None) -> None:
    os.chdir(cwd)
    for number, path in ((1, os.devnull), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    if before is not None:
        before()
    sys.argv = ["dspark", *args]
    code = 0
    try:
        from dspark_cli import start

        start.run()
    except SystemExit as end:
        code = int(end.code or 0)
    # as an interpreter ends, which a forked process does not do by itself
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
