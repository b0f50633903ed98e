"""Processes that this one starts and that end with it, however it ends. No torch here."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

LOST_PARENT = 1


class Child:
    """A Python process with the modules that this one would find.

    It reads `boot` with `read_boot`, and then ends when this process does: the pipe that brought it
    is closed by that, whatever happened. Its stdout is this process's stderr.
    """

    def __init__(
        self,
        main: str,
        boot: dict[str, Any],
        *,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        leads_group: bool = False,
    ) -> None:
        """Start it.

        Args:
            main: The function it runs, as `module:function`.
            boot: What it needs to know, as JSON values.
            pass_fds: Open files it inherits under the same numbers.
            env: Its environment; None: this process's.
            leads_group: With a process group of its own, `kill` ends its own children, too.
        """
        self._leads_group = leads_group
        self._killed = False
        self.process = subprocess.Popen(
            [sys.executable, "-c", boot_code(main)],
            stdin=subprocess.PIPE,
            stdout=_stderr(),  # stdout is this process's data
            pass_fds=pass_fds,
            env=env,
            process_group=0 if leads_group else None,
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which its exit code will tell
            self.process.stdin.write(json.dumps(boot).encode() + b"\n")
            self.process.stdin.flush()  # and stays open: its end is the news of ours

    def wait(self, timeout: float) -> None:
        """Let it end by itself for `timeout` seconds, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(timeout, 0.0))
        self.kill()

    def kill(self) -> None:
        """End it at once, and what is left of its group; again does nothing."""
        if self._killed:
            return
        self._killed = True
        if self._leads_group:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # of a boot that it did not live to read
                self.process.stdin.close()


def how_it_ended(code: int) -> tuple[str, str]:
    """What an exit code says.

    Args:
        code: As subprocess has it: negative for a signal.

    Returns:
        The end of a sentence about the process, and a hint.
    """
    if code >= 0:
        return f"ended with exit code {code}", "see what it printed"
    name = signal.Signals(-code).name
    hint = "the kernel's log may say who did it" if -code == signal.SIGKILL else ""
    return f"was ended by {name}", hint


def read_boot() -> dict[str, Any]:
    """What the parent wrote to stdin; from then on its end of the pipe is watched.

    The pipe closes when the parent ends, however it ends: then this process has nothing to do.
    """
    stream = os.fdopen(os.dup(0), "rb", buffering=0)
    line = b""
    while not line.endswith(b"\n"):
        part = stream.read(65536)
        if not part:
            os._exit(LOST_PARENT)
        line += part
    threading.Thread(target=_watch, args=(stream,), name="dspark-parent", daemon=True).start()
    boot: dict[str, Any] = json.loads(line)
    return boot


def leave_signals_to_parent() -> None:
    """It decides what Ctrl-C means, and a batch system's SIGTERM to all processes of a job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def boot_code(main: str) -> str:
    """Python that runs `module:function` with the modules that this process would find."""
    module, _, function = main.partition(":")
    return f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}()"


def _watch(stream: Any) -> None:
    while stream.read(1):
        pass
    os._exit(LOST_PARENT)


def _stderr() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
