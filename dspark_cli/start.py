"""The command's first lines: Ctrl-C is one line and 130 from here on, imports included."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130


def run() -> None:
    """Run `dspark`, and let a signal during imports end it: nothing is begun that could be lost."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup and `&` leave it
        signal.signal(signal.SIGINT, _stop)
    from dspark_cli.main import run as run_main

    run_main()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    # no exception: an extension module's import turns it into another one
    if sys.stderr is not None:
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    run()
