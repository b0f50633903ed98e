"""Standard streams that are closed, or full: one clear error, or silence, never a traceback."""

import errno
import io
import logging
import os
import sys
from typing import Any

from engine.errors import DSparkError

_MODES = (os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)
"""How a closed stream's number is taken: stdin cannot be read, stdout cannot be written."""


class _Stdin(io.FileIO):
    def readinto(self, buffer: Any, /) -> int:
        try:
            return super().readinto(buffer)
        except BlockingIOError:
            raise
        except OSError as error:
            raise DSparkError(
                f"cannot read stdin: {_reason(error)}", "give a file as INPUT, or open stdin"
            ) from None


class _Stdout(io.FileIO):
    broken = False

    def write(self, data: Any, /) -> int:
        if self.broken:
            return len(data)  # it has been said; what is still buffered is dropped
        try:
            return super().write(data)
        except (BrokenPipeError, BlockingIOError):
            raise
        except OSError as error:
            self.broken = True
            raise DSparkError(
                f"cannot write to stdout: {_reason(error)}", "write to a file with -o, or free it"
            ) from None


class _Stderr(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            return len(data)  # nobody to tell, and no reason to lose the run


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:  # looked up now: a progress bar may have wrapped it
            sys.stderr.write(f"dspark: {record.getMessage()}\n")


def show_log(*, quiet: bool) -> None:
    """Show what the engine decides, as lines of the command; warnings alone if `quiet`."""
    log = logging.getLogger("engine")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    if not any(isinstance(handler, _Log) for handler in log.handlers):
        log.addHandler(_Log())


def guard() -> None:
    """Put stand-ins for the three streams in place, unless somebody else has.

    A closed number is taken first: the next file opened would get it, and what libraries print
    would go there.
    """
    for number, mode in enumerate(_MODES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(_Stdin(0, "r", closefd=False)), "utf-8")
    if sys.stdout is sys.__stdout__:
        sys.stdout = _writer(_Stdout(1, "w", closefd=False), sys.stdout, "strict")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _writer(_Stderr(2, "w", closefd=False), sys.stderr, "backslashreplace")


def flush_stdout() -> None:
    """Write what is buffered now, while a failure can still be told.

    Raises:
        DSparkError: It cannot be written.
    """
    if not sys.stdout.closed:
        sys.stdout.flush()


def _writer(raw: io.FileIO, like: Any, errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(like, "encoding", None) or "utf-8",
        errors=getattr(like, "errors", None) or errors,
        line_buffering=raw.isatty() or isinstance(raw, _Stderr),
    )


def _reason(error: OSError) -> str:

    return "it is closed" if error.errno == errno.EBADF else str(error.strerror)
