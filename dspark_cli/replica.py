"""A replica's process: an engine that gets requests from another process and sends results back.

Messages are JSON, a line each. Here: `requests`. Back: `progress` of loading, `ready` with what
`front.describe` says, `done` with results, `stats` with the engine's counters, or `failed`.
"""

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from engine.child import leave_signals_to_parent, read_boot

_STATS_SECONDS = 0.5
_PROGRESS_SECONDS = 0.1


def main() -> None:
    """Serve the process that has started this one, until it closes the connection."""
    boot = read_boot()
    leave_signals_to_parent()
    if boot["cores"]:
        os.sched_setaffinity(0, boot["cores"])
    connection = Connection(socket.socket(fileno=boot["fd"]))
    code = 0
    try:
        _serve(connection, boot)
    except BaseException as error:  # noqa: BLE001 - the parent has to hear of it, whatever it is
        from engine.errors import describe_error

        code = 1
        text = "".join(traceback.format_exception(error))
        connection.send({"failed": {**describe_error(error), "traceback": text}})
    sys.stderr.flush()
    os._exit(code)  # ranks of its own, and threads in libraries, end with it


class Connection:
    """Lines of JSON over a socket; whole ones from any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send; if nobody is there to read it, `lines` ends, too."""
        data = json.dumps(message).encode() + b"\n"
        with self._sending, suppress(ConnectionError):
            self._end.sendall(data)

    def lines(self) -> Iterator[bytes]:
        """What comes, whole line by whole line, until the other end is closed."""
        stream = self._end.makefile("rb")
        with suppress(ConnectionError):  # closed before it had read all: a reset
            while (line := stream.readline()).endswith(b"\n"):
                yield line


def _serve(connection: Connection, boot: dict[str, Any]) -> None:
    from dspark_cli.front import describe
    from dspark_cli.loading import make
    from engine.config import EngineConfig
    from engine.feed import Feed
    from engine.wire import encode_result

    engine, _ = make(EngineConfig.from_json(boot["config"]), _Loading(connection), boot["rows"])
    connection.send({"ready": describe(engine)})
    feed = Feed()
    ended = threading.Event()

    def send_stats() -> None:
        connection.send({"stats": engine.stats.to_json()})

    def tell() -> None:
        while not ended.wait(_STATS_SECONDS):
            send_stats()

    threading.Thread(target=_listen, args=(connection, feed), daemon=True).start()
    threading.Thread(target=tell, daemon=True).start()
    for result in engine.run(feed):
        request = result.request
        name = [request.request_id, request.sample_index]
        idle = feed.settle()
        if idle:
            send_stats()
        connection.send({"done": [*name, encode_result(result)]})
    ended.set()
    engine.close()


def _listen(connection: Connection, feed: Any) -> None:
    from engine.request import Request

    for line in connection.lines():
        feed.put([Request.from_json(each) for each in json.loads(line)["requests"]])
    feed.end()


class _Loading:
    """Tells how loading goes, now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._phase = ""
        self._next = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        """As Engine's `on_progress`."""
        now = time.monotonic()
        if phase != self._phase or done == total or now >= self._next:
            self._phase, self._next = phase, now + _PROGRESS_SECONDS
            self._connection.send({"progress": [phase, done, total]})
