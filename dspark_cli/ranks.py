"""The command under torchrun: rank 0 runs it, the others do as it says."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def led() -> Iterator[None]:
    """Run the command as rank 0, and send the others home after it.

    Without torchrun it does nothing; on another rank it never gets to the command.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    from engine.follower import dismiss_torchrun, serve_torchrun

    if os.environ["RANK"] != "0":
        sys.exit(serve_torchrun())
    try:
        yield
    finally:
        dismiss_torchrun()
