"""Processes that end with the one that started them."""

import signal
import subprocess
from typing import Any

import pytest

from engine.child import Child, how_it_ended


def test_one_that_is_killed_before_it_reads_what_it_needs_has_just_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it did not read was written again as its pipe was closed, and that ended the run."""
    real = subprocess.Popen

    def killed(*args: Any, **kwargs: Any) -> Any:
        process = real(*args, **kwargs)
        process.kill()
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", killed)
    child = Child("engine.child:read_boot", {"rows": 3})
    child.wait(5)
    child.kill()
    assert how_it_ended(child.process.returncode)[0] == "was ended by SIGKILL"
    assert child.process.returncode == -signal.SIGKILL
    assert child.process.stdin is not None
    assert child.process.stdin.closed
