"""The other ranks' processes on this host: started, watched, ended."""

import json
import os
import threading
import time
from typing import Any

from engine.child import Child, how_it_ended
from engine.dist.control import RankError
from engine.dist.watch import Watch

MAIN = "engine.follower:main"
_LEAVE_S = 10.0
"""Time to leave when told to; a CUDA process takes a while."""


class Processes:
    """Ranks 1 to size-1. They end when told to, when this process ends, or by force.

    Args:
        size: Ranks in all.
        boot: What each needs to find the others; its rank is added.
        watch: Hears of a rank that ends uncalled.
    """

    def __init__(self, size: int, boot: dict[str, Any], watch: Watch) -> None:
        self._watch = watch
        self._stopping = False
        self._children = [self._start({**boot, "rank": rank}) for rank in range(1, size)]

    def stop(self, at_once: bool) -> None:
        """Wait for ranks that were told to leave, then kill.

        Args:
            at_once: Do not wait.
        """
        self._stopping = True
        until = time.monotonic() + (0.0 if at_once else _LEAVE_S)
        for child in self._children:
            child.wait(until - time.monotonic())

    def _start(self, boot: dict[str, Any]) -> Child:
        reads, writes = os.pipe()
        child = Child(MAIN, {**boot, "report_fd": writes}, pass_fds=[writes])
        os.close(writes)
        args = (boot["rank"], child, reads)
        threading.Thread(target=self._follow, args=args, daemon=True).start()
        return child

    def _follow(self, rank: int, child: Child, reads: int) -> None:
        with os.fdopen(reads, "rb") as pipe:
            report = pipe.read()
        code = child.process.wait()
        if not self._stopping:
            self._watch.report(*_news(rank, code, report))


def _news(rank: int, code: int, report: bytes) -> tuple[RankError, int]:
    """What a rank's end means, and how much it explains."""
    if code >= 0 and report:
        found = json.loads(report)
        text = f"rank {rank}: {found['error']}"
        error = RankError(text, found["hint"], found["exit_code"])
        error.add_note(found["traceback"])
        return error, 0 if found["lost_peer"] else 2
    text, hint = how_it_ended(code)
    return RankError(f"rank {rank} {text}", hint), 2 if code < 0 else 1
