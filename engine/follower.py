"""Ranks other than 0: the same engine on the same requests, told by rank 0 what comes next."""

import json
import os
import signal
import sys
import traceback
from typing import Any

from engine.child import leave_signals_to_parent, read_boot


def main() -> None:
    """Be a rank that another process has started; returns when sent away."""
    boot = read_boot()
    leave_signals_to_parent()
    code = 0
    try:
        _run(boot)
    except BaseException as error:  # noqa: BLE001 - rank 0 has to hear of it, whatever it is
        code = 1
        _report(boot["report_fd"], error)
    sys.stderr.flush()
    os._exit(code)  # nothing is left to tidy up that a closed connection does not


def serve_torchrun() -> int:
    """Be a rank that torchrun has started; the exit code."""
    from engine.dist.connect import join_room
    from engine.dist.control import RankError
    from engine.dist.torchrun import launched, meet, next_room
    from engine.dist.watch import Watch
    from engine.errors import DSparkError

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = launched()
    assert place is not None
    store, number = meet(place), 1
    while (room := next_room(store, number)) is not None:
        try:
            watch = Watch()
            _follow(join_room(place, *room, watch))
            watch.close()
        except RankError as error:
            return error.exit_code  # the rank that failed says why
        except DSparkError as error:
            sys.stderr.write(f"error: rank {place.rank}: {error}\n")
            return error.exit_code
        number += 1
    return 0


def dismiss_torchrun() -> None:
    """Tell the ranks that torchrun has started, as rank 0, that nothing more comes."""
    from engine.dist.torchrun import dismiss, launched, meet

    place = launched()
    assert place is not None
    dismiss(meet(place))


def _run(boot: dict[str, Any]) -> None:
    from engine.dist.connect import join
    from engine.dist.watch import Watch

    _follow(join(boot, Watch()))


def _follow(group: Any) -> None:
    """Do what rank 0 wants ranks for: be an engine, or measure exchanges or a drafter's tail."""
    told = group.tell(None)
    if "collapse" in told:
        from engine.collapse_bench import follow_collapse

        follow_collapse(group, told["collapse"])
        return
    if "exchanges" in told:
        from engine.exchanges import follow_exchanges

        follow_exchanges(group, told["exchanges"])
        return
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.garbage import settle

    engine = Engine(EngineConfig.from_json(told["engine"]), group=group)
    settle(engine.runner.rows.device)
    engine.mirror()


def _report(descriptor: int, error: BaseException) -> None:
    """Tell rank 0, which tells the user."""
    from engine.dist.control import RankError
    from engine.errors import describe_error

    found = {
        **describe_error(error),
        "lost_peer": isinstance(error, RankError),
        "traceback": "".join(traceback.format_exception(error)),
    }
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(json.dumps(found).encode())
