"""A rank's process ends with the process that started it. No torch: it works during imports."""

import json
import os
import sys
import threading
from typing import Any

LOST_PARENT = 1


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


def _watch(stream: Any) -> None:
    while stream.read(1):
        pass
    os._exit(LOST_PARENT)


def boot_code() -> str:
    """Python that runs a rank with the modules that this process would find."""
    return f"import sys; sys.path[:] = {sys.path!r}; from engine.follower import main; main()"
