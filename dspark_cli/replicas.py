"""--data-parallel-size: several engines on this host, each a process, behind one front.

Rows are handed out as replicas have room; each has some more than it runs, so that it never waits
for this process: as many again while there are plenty (rows of one length end all at once), fewer
towards the end, so that none is left alone with them. What a dead replica had not finished goes
back to the front of the queue.
"""

import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dspark_cli.front import check_same
from dspark_cli.parts import Share, share_out
from dspark_cli.progress import Counts
from engine.child import Child, how_it_ended
from engine.config import EngineConfig
from engine.errors import DSparkError, ProcessError
from engine.request import Completion, Request, RequestFailure
from engine.telemetry import EngineStats, merge
from engine.wire import decode_result

MAIN = "dspark_cli.replica:main"
MAX_RESTARTS = 2
_READ_BYTES = 1 << 20
_SOON_S = 0.02
"""Until the source is asked again after it had nothing yet."""

_LEAVE_S = 10.0
_USAGE = 2

Name = tuple[str, int]
Output = Completion | RequestFailure


class Replicas:
    """Engines of equal settings that share out the requests; as Front.

    Args:
        config: The settings of each.
        count: How many.
        counts: Of the lines that requests are made for: how many in all, and still to come.
        say: Told of replicas that die.
        on_progress: Told how loading goes, as Engine's.

    Raises:
        DSparkError: One cannot be loaded, or keeps dying.
    """

    def __init__(
        self,
        config: EngineConfig,
        count: int,
        counts: Counts,
        *,
        say: Callable[[str], None],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self.stats = EngineStats()
        self._say = say
        self._on_progress = on_progress
        self._past: list[EngineStats] = []
        """Of processes that have ended."""

        self._returned: deque[Request] = deque()
        """What those had not finished."""

        self._counts = counts
        shares = share_out(config, count)
        each = None if counts.total is None else -(-counts.total // count)
        self._members = [_Member(at, share, each) for at, share in enumerate(shares)]
        try:
            for member in self._members:
                member.start()
            while any(member.about is None for member in self._members):
                self._hear(None)
        except BaseException:
            self.close()
            raise

    @property
    def engines(self) -> list[dict[str, Any]]:
        """As Front."""
        return [member.about for member in self._members if member.about is not None]

    def run(self, requests: Iterable[Request | None]) -> Iterator[Output]:
        """As Front.

        Raises:
            DSparkError: A replica died more often than it is started again, or cannot be loaded
                again; or `requests` gave None while nothing ran.
        """
        source = iter(requests)
        state = "more"
        while True:
            if state != "ended":
                state = self._hand_out(source)
            else:
                self._hand_out(iter(()))
            if not self._busy:
                if state == "ended":
                    return
                if state == "not yet":
                    raise DSparkError(
                        "the source of requests waits for results, but no request is running"
                    )
            yield from self._hear(_SOON_S if state == "not yet" else None)

    def close(self) -> None:
        """Send the replicas away, by force if they are in the middle of something."""
        loading = any(member.about is None for member in self._members)
        until = time.monotonic() + (0.0 if self._busy or loading else _LEAVE_S)
        for member in self._members:
            member.hang_up()
        for member in self._members:
            member.end(until - time.monotonic())

    @property
    def _busy(self) -> bool:
        return bool(self._returned) or any(member.given for member in self._members)

    def _hand_out(self, source: Iterator[Request | None]) -> str:
        """Give every replica what it has room for.

        Returns:
            `full`, `not yet` if the source had nothing for now, or `ended`.
        """
        batches: dict[int, list[Request]] = {}
        state = "full"
        left = self._counts.to_come
        share = None if left is None else (left + len(self._returned)) // len(self._members)
        while (member := max(self._members, key=lambda m: m.room(share))).room(share) > 0:
            request = self._returned.popleft() if self._returned else next(source, _ENDED)
            if request is None or request is _ENDED:
                state = "not yet" if request is None else "ended"
                break
            assert isinstance(request, Request)
            member.given[request.request_id, request.sample_index] = request
            batch = batches.setdefault(member.number, [])
            batch.append(request)
            if len(batch) == member.width:  # a batch of its own: it may begin meanwhile
                member.send(batches.pop(member.number))
        for number, batch in batches.items():
            self._members[number].send(batch)
        return state

    def _hear(self, timeout: float | None) -> list[Output]:
        """Wait for news, and take them in.

        Args:
            timeout: Seconds; None: until there are some.
        """
        found: list[Output] = []
        by_fd = {m.connection.fileno(): m for m in self._members}
        for fd in select.select(list(by_fd), [], [], timeout)[0]:
            member = by_fd[fd]
            lines = member.read()
            for line in lines or []:
                found += self._take(member, json.loads(line))
            if lines is None:
                self._lost(member)
        return found

    def _take(self, member: "_Member", message: dict[str, Any]) -> list[Output]:
        if "done" in message:
            request_id, sample, value = message["done"]
            result = decode_result(value, member.given.pop((request_id, sample)))
            if isinstance(result, Completion):
                member.delivered += len(result.token_ids)
            return [result]
        if "stats" in message:
            member.stats = EngineStats.from_json(message["stats"])
            self.stats.become(merge([*self._past, *(m.stats for m in self._members)]))
        elif "ready" in message:
            member.about, member.served = message["ready"], True
            check_same(self.engines[0], member.about)
        elif "failed" in message:
            member.failure = message["failed"]
        elif member.number == 0:
            self._on_progress(*message["progress"])
        return []

    def _lost(self, member: "_Member") -> None:
        """A replica has ended: its rows go to whoever has room, and it is started again.

        Raises:
            ProcessError: That would be of no use, or was tried before.
        """
        error = member.news()
        self._returned.extendleft(reversed(member.given.values()))
        rows = len(member.given)
        self._past.append(member.retire())
        unloadable = member.failure is not None and not member.served
        if error.exit_code == _USAGE or unloadable or member.deaths > MAX_RESTARTS:
            raise error
        self._say(
            f"{error}; its {rows} unfinished rows run again, and it is started again "
            f"({member.deaths} of {MAX_RESTARTS})"
        )
        member.start()


_ENDED = object()


class _Member:
    """One replica: its process, and what it was given.

    Args:
        number: From 0.
        share: Its part of this host, and its settings.
        rows: Requests it may get, if that is known.
    """

    def __init__(self, number: int, share: Share, rows: int | None) -> None:
        self.number = number
        self.given: dict[Name, Request] = {}
        """Requests without a result."""

        self.about: dict[str, Any] | None = None
        """What it says of itself; None while it loads."""

        self.failure: dict[str, Any] | None = None
        """What it said when it failed."""

        self.stats = EngineStats()
        self.delivered = 0
        """Tokens of its results."""

        self.deaths = 0
        self.served = False
        """Has it ever been ready? One that says why it cannot be loaded will say so again."""

        self.connection: socket.socket
        self._share = share
        self._rows = rows
        self._child: Child | None = None
        self._partial = b""

    @property
    def width(self) -> int:
        """Requests that it runs at once, once it is ready."""
        return 0 if self.about is None else int(self.about["settings"]["max_num_seqs"])

    def room(self, share: int | None) -> int:
        """How many more requests it should have.

        Beside those that it runs at once, half of what is still to come for it: a quarter as many
        at least, as many again at most.

        Args:
            share: What is still to come for it, if that is known.
        """
        if self.about is None:
            return 0
        width = self.width
        least = max(2, width // 4)
        spare = least if share is None else max(least, min(width, share // 2))
        return width + spare - len(self.given)

    def start(self) -> None:
        """Start a process."""
        ours, theirs = socket.socketpair()
        self.connection = ours
        self._partial, self.about, self.failure = b"", None, None
        boot = {
            "fd": theirs.fileno(),
            "config": self._share.config.to_json(),
            "rows": self._rows,
            "cores": self._share.cores,
        }
        env = {**os.environ, **self._share.env}
        self._child = Child(MAIN, boot, pass_fds=[theirs.fileno()], env=env, leads_group=True)
        theirs.close()

    def send(self, requests: list[Request]) -> None:
        """Give it requests; if it has just died, reading will tell."""
        message = {"requests": [request.to_json() for request in requests]}
        with suppress(ConnectionError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[bytes] | None:
        """Whole lines that have come; None once there will be no more."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines

    def news(self) -> ProcessError:
        """Why it has ended."""
        assert self._child is not None
        self._child.wait(_LEAVE_S)
        self.deaths += 1
        name = f"replica {self.number}"
        if self.failure is None:
            text, hint = how_it_ended(self._child.process.returncode)
            error = ProcessError(f"{name} {text}", hint)
        else:
            text, hint = f"{name}: {self.failure['error']}", self.failure["hint"]
            error = ProcessError(text, hint, self.failure["exit_code"])
            error.add_note(self.failure["traceback"])
        if self.deaths <= MAX_RESTARTS or error.exit_code == _USAGE:
            return error
        return ProcessError(f"{error} ({self.deaths} times now)", error.hint, error.exit_code)

    def retire(self) -> EngineStats:
        """Forget the process that has ended; what it had counted, but for tokens that are lost."""
        self.connection.close()
        self.given = {}
        counted, self.stats = self.stats, EngineStats()
        tokens, self.delivered = self.delivered, 0
        return replace(
            counted,
            output_tokens=tokens,
            running=0,
            waiting=0,
            kv_blocks_used=0,
            kv_blocks_total=0,
            max_num_seqs=0,
        )

    def hang_up(self) -> None:
        """Say that nothing more comes; what it still says is not in its way."""
        if self._child is not None:
            with suppress(OSError):  # it has ended, or is forgotten
                self.connection.shutdown(socket.SHUT_WR)

    def end(self, timeout: float) -> None:
        """Wait for its end, then kill."""
        if self._child is not None:
            self._child.wait(timeout)
            self.connection.close()
