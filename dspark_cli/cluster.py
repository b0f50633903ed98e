"""--cluster: the same job on a Ray cluster, as a Ray Data pipeline behind the front.

Here are reading, tokenising, the journal and the output, as on one host. Requests go out in packets
(blocks of a dataset) to a pool of actors with an engine each; Ray Data hands them out, and gives
them out again when an actor or its host dies. Noise is keyed by what is in the request, so that it
does not matter who completes it, or how often.
"""

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from typing import Any

from dspark_cli.cluster_plan import PACKETS, connect, plan_engines
from dspark_cli.front import check_same
from engine.config import EngineConfig
from engine.errors import ConfigError, DSparkError, ProcessError
from engine.request import Completion, Request, RequestFailure
from engine.telemetry import EngineStats, merge
from engine.wire import decode_result

MAX_RESTARTS = 2
_SOON_S = 0.02
_NEWS_S = 0.5
_LEAVE_S = 30.0
_UNTAKEN_S = 5.0
_AGAIN = "finished rows are kept: run the same command again"

Name = tuple[str, int]
Output = Completion | RequestFailure


class Cluster:
    """Engines on a Ray cluster; as Front.

    Args:
        config: The settings of each.
        address: A cluster's address, `auto` for the one around, `local` for one of this host that
            ends with the run.
        count: Engines; None: as many as there is room for.
        say: Told what happens.

    Raises:
        DSparkError: Ray is not installed, there is no such cluster, or no engine can be loaded.
    """

    def __init__(
        self, config: EngineConfig, address: str, count: int | None, *, say: Callable[[str], None]
    ) -> None:
        self.stats = EngineStats()
        self._say = say
        self._stdout = redirect_stdout(sys.stderr)  # stdout is data; Ray prints there
        self._ray = ray = connect(address)
        self._abouts: dict[str, dict[str, Any]] = {}
        """Engines that have been, by key; one that is started again has another."""

        self._counted: dict[str, tuple[float, EngineStats]] = {}
        """When, on its clock, and what."""

        self._nodes: dict[str, str] = {}
        """Key to node."""

        self._actors: dict[str, str] = {}
        """Ray's name of an actor, which stays when it is started again, to its latest key."""

        self._deaths: dict[str, int] = {}
        self._lost: set[str] = set()
        self._suspects: list[tuple[float, list[int]]] = []
        """When to send which packets again if nobody has taken them by then."""

        self._failure: dict[str, Any] | None = None
        self._waiting: dict[Name, Request] = {}
        self._packets: dict[int, list[Name]] = {}
        """Those without a result."""

        self._taken: dict[int, str] = {}
        self._sent = 0
        self._look = 0.0
        self._open = True
        self._results: queue.Queue[dict[str, Any] | BaseException | None] = queue.Queue()
        self._stdout.__enter__()
        try:
            nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
            self._plan = plan_engines(config, count, nodes)
            self._check_room(address)
            self._mailbox = self._start()
            say(f"waiting for the first of {self._plan.count} engines of {len(nodes)} nodes")
            while not self._abouts:
                self._take_news()
                self._results_after(_NEWS_S)
        except BaseException:
            self.close()
            raise

    @property
    def engines(self) -> list[dict[str, Any]]:
        """As Front."""
        return list(self._abouts.values())

    def run(self, requests: Iterable[Request | None]) -> Iterator[Output]:
        """As Front.

        Raises:
            DSparkError: An engine died more often than it is started again, the cluster is gone,
                or `requests` gave None while nothing ran.
        """
        source = iter(requests)
        state = "full"
        while True:
            if state != "ended":
                state = self._hand_out(source)
            if not self._waiting:
                if state == "ended":
                    with suppress(DSparkError):  # every row is made, whatever else is told
                        self._take_last_news()
                    return
                if state == "not yet":
                    raise DSparkError(
                        "the source of requests waits for results, but no request is running"
                    )
            if time.monotonic() >= self._look:
                self._look = time.monotonic() + _NEWS_S
                self._take_news()
                self._look_at_nodes()
            for answer in self._results_after(_SOON_S if state == "not yet" else _NEWS_S):
                yield from self._take(answer)

    def close(self) -> None:
        """Leave the cluster, and with it end what was started there."""
        if not self._open:
            return
        self._open = False
        if not self._waiting and hasattr(self, "_thread"):
            self._mailbox.end.remote(self._sent)
            self._thread.join(_LEAVE_S)
        self._ray.shutdown()
        self._stdout.__exit__(None, None, None)

    def _start(self) -> Any:
        """Begin the pipeline; its mailbox."""
        import ray.data

        from dspark_cli.cluster_worker import EngineActor, Mailbox, Packets

        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        beside: dict[str, Any] = {"num_cpus": 0, "label_selector": here}
        mailbox = ray.remote(Mailbox).options(**beside, max_concurrency=1000).remote()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.target_max_block_size = 1  # a packet is a block
        plan = self._plan
        packets = ray.data.read_datasource(Packets(mailbox), override_num_blocks=1, **beside)
        done = packets.map_batches(
            EngineActor,
            fn_constructor_kwargs={"config": plan.config.to_json(), "mailbox": mailbox},
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(
                size=plan.count,
                max_tasks_in_flight_per_actor=PACKETS,
                max_concurrent_calls_per_actor=PACKETS,
                enable_true_multi_threading=True,
            ),
            num_cpus=plan.num_cpus,
            num_gpus=plan.num_gpus or None,
        )
        self._thread = threading.Thread(target=self._collect, args=(done,), daemon=True)
        self._thread.start()
        return mailbox

    def _collect(self, done: Any) -> None:
        """The thread that runs the pipeline."""
        try:
            for batch in done.iter_batches(batch_size=None, prefetch_batches=0):
                for answer in batch["packet"]:
                    if answer:
                        self._results.put(json.loads(bytes(answer)))
            self._results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where results are taken
            self._results.put(error)

    def _check_room(self, address: str) -> None:
        plan, there = self._plan, self._ray.cluster_resources()
        for name, each in (("CPU", plan.num_cpus), ("GPU", plan.num_gpus)):
            if plan.count * each <= there.get(name, 0):
                continue
            text = f"{plan.count} engines need {plan.count * each} {name}s, "
            text += f"the cluster has {there.get(name, 0):g}"
            if address == "local":
                raise ConfigError(text, "lower --data-parallel-size, -tp or --threads")
            self._say(f"{text}: some wait until it has grown")

    def _hand_out(self, source: Iterator[Request | None]) -> str:
        """Send packets while there is room.

        Returns:
            `full`, `not yet` if the source had nothing for now, or `ended`.
        """
        while len(self._packets) < self._plan.count * PACKETS:
            packet: list[Request] = []
            state = "full"
            while len(packet) < self._plan.rows_per_packet and state == "full":
                request = next(source, _ENDED)
                if request is None or request is _ENDED:
                    state = "not yet" if request is None else "ended"
                    continue
                assert isinstance(request, Request)
                packet.append(request)
            if packet:
                self._waiting.update({_name(request): request for request in packet})
                self._send(packet)
            if state != "full":
                return state
        return "full"

    def _send(self, requests: list[Request]) -> None:
        number = self._sent
        self._sent += 1
        self._packets[number] = [_name(request) for request in requests]
        message = {"number": number, "requests": [request.to_json() for request in requests]}
        self._mailbox.put.remote(number, json.dumps(message).encode())

    def _results_after(self, timeout: float) -> list[dict[str, Any]]:
        """What has come; waits for the first.

        Raises:
            DSparkError: The pipeline has failed.
        """
        found: list[dict[str, Any]] = []
        try:
            while True:
                answer = self._results.get(timeout=0.0 if found else timeout)
                if answer is None:
                    raise DSparkError("the pipeline has ended before its rows", _AGAIN)
                if isinstance(answer, BaseException):
                    self._take_last_news()
                    raise self._explain(answer)
                found.append(answer)
        except queue.Empty:
            return found

    def _take(self, answer: dict[str, Any]) -> list[Output]:
        number, key = answer["number"], answer["key"]
        self._packets.pop(number, None)
        self._taken.pop(number, None)
        self._mailbox.forget.remote([number])
        if answer["at"] > self._counted.get(key, (0.0, self.stats))[0]:  # they may pass each other
            self._counted[key] = answer["at"], EngineStats.from_json(answer["stats"])
            self.stats.become(merge(stats for _, stats in self._counted.values()))
        found = []
        for request_id, sample, value in answer["results"]:
            request = self._waiting.pop((request_id, sample), None)
            if request is not None:  # else it was given out again, and has been done before
                found.append(decode_result(value, request))
        return found

    def _take_news(self) -> None:
        """What engines tell.

        Raises:
            DSparkError: One cannot be loaded, or would give other outputs; or nobody can be asked.
        """
        try:
            news = self._ray.get(self._mailbox.news.remote(), timeout=_LEAVE_S)
        except self._ray.exceptions.RayError as error:
            raise self._explain(error) from None
        for message in news:
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        key = message["key"]
        if "took" in message:
            if message["took"] in self._packets:
                self._taken[message["took"]] = key
        elif "ready" in message:
            self._welcome(key, message)
        elif "broke" in message:
            self._failure = message["broke"]
            self._say(f"an engine has failed: {self._failure['error']}")
        else:
            found = message["failed"]
            raise ProcessError(
                f"an engine cannot be loaded: {found['error']}", found["hint"], found["exit_code"]
            )

    def _welcome(self, key: str, message: dict[str, Any]) -> None:
        """An engine is ready: a new one, or one that has died and was started again by Ray.

        Raises:
            DSparkError: It has died too often, its node's ends left out; or is not as the others.
        """
        about, actor, node = message["ready"], message["actor"], message["node"]
        before = self._actors.get(actor)
        self._abouts[key], self._nodes[key], self._actors[actor] = about, node, key
        check_same(self.engines[0], about)
        if before is None:
            self._say(f"an engine is ready on {about['host']} ({about['device']})")
            return
        if self._nodes[before] not in self._gone():
            self._deaths[actor] = self._deaths.get(actor, 0) + 1
        deaths, host = self._deaths.get(actor, 0), self._abouts[before]["host"]
        if deaths > MAX_RESTARTS:
            what = "" if self._failure is None else f": {self._failure['error']}"
            raise ProcessError(
                f"an engine on {host} ended {deaths} times{what}",
                f"{_AGAIN}; the cluster's logs may say who ended it",
            )
        self._say(
            f"an engine on {host} has ended; its unfinished rows run again, and it was started "
            f"again on {about['host']} ({deaths} of {MAX_RESTARTS})"
        )

    def _take_last_news(self) -> None:
        """What was told before the end, if anybody can still say it."""
        try:
            news = self._ray.get(self._mailbox.news.remote(), timeout=1.0)
        except self._ray.exceptions.RayError:
            return
        for message in news:
            self._note(message)

    def _look_at_nodes(self) -> None:
        """Packets of a node that is gone go out again: its engine may find no room elsewhere.

        So do, after a while, those that nobody has taken: they may be on their way to that engine.
        """
        gone, now = self._gone(), time.monotonic()
        for key, node in self._nodes.items():
            if node not in gone or key in self._lost:
                continue
            self._lost.add(key)
            rows = self._send_again([n for n, by in self._taken.items() if by == key])
            untaken = [number for number in self._packets if number not in self._taken]
            self._suspects.append((now + _UNTAKEN_S, untaken))
            self._say(f"{self._abouts[key]['host']} is gone; its {rows} unfinished rows run again")
        while self._suspects and self._suspects[0][0] <= now:
            _, numbers = self._suspects.pop(0)
            self._send_again([number for number in numbers if number not in self._taken])

    def _send_again(self, numbers: list[int]) -> int:
        """Send packets under new numbers; how many rows they still lack."""
        rows = 0
        for number in numbers:
            self._taken.pop(number, None)
            names = self._packets.pop(number, [])
            left = [self._waiting[name] for name in names if name in self._waiting]
            rows += len(left)
            if left:
                self._send(left)
        return rows

    def _gone(self) -> set[str]:
        """Nodes that have left."""
        try:
            return {node["NodeID"] for node in self._ray.nodes() if not node["Alive"]}
        except (RuntimeError, OSError, self._ray.exceptions.RayError) as error:
            raise self._explain(error) from None

    def _explain(self, error: BaseException) -> DSparkError:
        """A failure of the pipeline, for people."""
        if isinstance(error, DSparkError):
            return error
        if self._failure is not None:
            return ProcessError(
                f"an engine kept failing: {self._failure['error']}",
                self._failure["hint"] or _AGAIN,
                self._failure["exit_code"],
            )
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return DSparkError(f"the cluster failed: {lines[-1]}", _AGAIN)


_ENDED = object()


def _name(request: Request) -> Name:
    return request.request_id, request.sample_index
