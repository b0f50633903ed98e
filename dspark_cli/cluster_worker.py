"""What runs on a Ray cluster: packets of requests on their way to actors that hold an engine.

Imported where Ray is installed only. A packet is a few requests as JSON in one cell of a dataset's
row; an actor gives one row back for it, with all of its results, so that a packet that is run again
gives the same block.
"""

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from dspark_cli.front import describe
from dspark_cli.loading import make
from engine.config import EngineConfig
from engine.errors import ProcessError, describe_error
from engine.feed import Feed
from engine.request import Completion, Request, RequestFailure
from engine.wire import encode_result

if TYPE_CHECKING:
    from engine.engine import Engine

COLUMN = "packet"
_WAIT_S = 60.0

Name = tuple[str, int]


class Mailbox:
    """An actor beside the driver: packets to the pipeline, news from engines.

    Packets are kept until their results are there: a read that is run again finds them.
    """

    def __init__(self) -> None:
        self._packets: dict[int, bytes] = {}
        self._end: int | None = None
        self._news: list[dict[str, Any]] = []
        self._changed = asyncio.Condition()

    async def put(self, number: int, packet: bytes) -> None:
        """The packet of a number; they may come in any order."""
        async with self._changed:
            self._packets[number] = packet
            self._changed.notify_all()

    async def forget(self, numbers: list[int]) -> None:
        """The results of these are there."""
        for number in numbers:
            self._packets[number] = b""

    async def end(self, count: int) -> None:
        """There are so many packets in all."""
        async with self._changed:
            self._end = count
            self._changed.notify_all()

    async def take(self, number: int) -> list[bytes] | None:
        """Packets from `number` on, as many as there are in a row; None after the last one."""
        async with self._changed:
            await self._changed.wait_for(lambda: number in self._packets or self._end == number)
            if number == self._end:
                return None
            found: list[bytes] = []
            while number + len(found) in self._packets:
                found.append(self._packets[number + len(found)])
            return found

    async def tell(self, message: dict[str, Any]) -> None:
        """News of an engine."""
        self._news.append(message)

    async def news(self) -> list[dict[str, Any]]:
        """What was told since the last call."""
        found, self._news = self._news, []
        return found


class Packets(Datasource):  # type: ignore[misc,unused-ignore]
    """What comes out of a mailbox, a block each.

    Args:
        mailbox: Handle of a Mailbox.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def estimate_inmemory_data_size(self) -> int | None:
        """Nobody knows."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[Any]:
        """One task, which lasts as long as the run."""
        about = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        mailbox = self._mailbox
        return [ReadTask(lambda: _read(mailbox), about)]


def _read(mailbox: Any) -> Iterator[Any]:
    number = 0
    while (packets := ray.get(mailbox.take.remote(number))) is not None:
        for packet in packets:
            yield pa.table({COLUMN: pa.array([packet], pa.binary())})
        number += len(packets)


class EngineActor:
    """A pool's actor: one engine, which runs the packets of all calls at once.

    Args:
        config: EngineConfig as JSON.
        mailbox: Where to tell of itself.
    """

    def __init__(self, config: dict[str, Any], mailbox: Any) -> None:
        self._key = uuid.uuid4().hex
        self._mailbox = mailbox
        self._feed = Feed()
        self._calls: dict[Name, list[_Call]] = {}
        self._changing = threading.Lock()
        self._loaded = threading.Event()
        self._error: BaseException | None = None
        self._engine: Engine | None = None
        threading.Thread(target=self._work, args=(config,), daemon=True).start()
        self._loaded.wait()
        if self._error is not None:
            self._tell_and_wait({"failed": describe_error(self._error)})
            raise self._error
        context = ray.get_runtime_context()
        assert self._engine is not None
        about = {**describe(self._engine), "ray": ray.__version__, "pid": os.getpid()}
        place = {"node": context.get_node_id(), "actor": context.get_actor_id()}
        self._tell_and_wait({"ready": about, **place})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Run packets to their end."""
        found = [self._run(bytes(packet)) for packet in batch[COLUMN]]
        return {COLUMN: np.array(found, dtype=object)}

    def _run(self, packet: bytes) -> bytes:
        if not packet:  # its results are there already
            return b""
        message = json.loads(packet)
        self._mailbox.tell.remote({"key": self._key, "took": message["number"]})
        requests = [Request.from_json(each) for each in message["requests"]]
        call = _Call(len(requests))
        with self._changing:
            # a packet that was given out again may meet itself: each request runs once
            fresh = [r for r in requests if (r.request_id, r.sample_index) not in self._calls]
            for r in requests:
                self._calls.setdefault((r.request_id, r.sample_index), []).append(call)
        self._feed.put(fresh)
        call.done.wait()
        results = [(r.request.request_id, r.request.sample_index, encode_result(r)) for r in call]
        assert self._engine is not None
        stats = self._engine.stats.to_json()
        answer = {"number": message["number"], "key": self._key, "results": results}
        return json.dumps({**answer, "stats": stats, "at": time.monotonic()}).encode()

    def _work(self, config: dict[str, Any]) -> None:
        """The engine's thread."""
        try:
            self._engine, _ = make(EngineConfig.from_json(config), lambda *_: None, None)
            self._loaded.set()
            for result in self._engine.run(self._feed):
                name = result.request.request_id, result.request.sample_index
                self._feed.settle()
                with self._changing:
                    calls = self._calls.pop(name)
                for call in calls:
                    call.add(result)
        except BaseException as error:  # noqa: BLE001 - the driver has to hear of it
            self._error = error
            if not self._loaded.is_set():
                self._loaded.set()
                return
            self._tell_and_wait({"broke": describe_error(error)})
            os._exit(1)  # Ray starts the actor again, and gives it its packets again

    def _tell_and_wait(self, message: dict[str, Any]) -> None:
        try:
            ray.get(self._mailbox.tell.remote({"key": self._key, **message}), timeout=_WAIT_S)
        except ray.exceptions.RayError as error:
            raise ProcessError(f"the driver cannot be reached: {error}") from None


class _Call:
    """Results of one packet."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._results: list[Completion | RequestFailure] = []
        self.done = threading.Event()

    def __iter__(self) -> Iterator[Completion | RequestFailure]:
        return iter(self._results)

    def add(self, result: Completion | RequestFailure) -> None:
        """One more; from the engine's thread."""
        self._results.append(result)
        if len(self._results) == self._missing:
            self.done.set()
