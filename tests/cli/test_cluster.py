"""--cluster without Ray: how engines are laid out, and the driver's part, over a pool of threads.

With Ray and real engines: tests/e2e/test_cluster.py.
"""

import json
import queue
import socket
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_cli import cluster
from dspark_cli.cluster_plan import check_answers, plan_engines
from dspark_cli.front import describe
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import Request
from engine.wire import encode_result
from tests.cli import fake
from tests.cli.conftest import Bench

ROWS: list[Any] = [
    *({"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(60)),
    {"id": "several", "prompt": "x", "n": 3, "temperature": 1},
    {"id": "long", "prompt": "y" * 300},
    {"id": "turns", "turns": ["one", "two", "three"]},
]


class Remote:
    """An actor's method, called at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class FakeRay:
    """Two nodes; `faults` says what becomes of the n-th packet that an engine of node 1 takes."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.alive = [True, True]
        self.down = False
        self.died = threading.Event()
        """Node 1 has had its deaths, or will have no more packets."""

        self.waiting: queue.Queue[bytes | None] = queue.Queue()
        self.told: list[dict[str, Any]] = []
        self.late: list[dict[str, Any]] = []
        self.mailbox = SimpleNamespace(
            put=Remote(lambda _number, packet: self.waiting.put(packet)),
            forget=Remote(lambda _numbers: None),
            end=Remote(lambda _count: [self.waiting.put(None) for _ in range(2)]),
            news=Remote(self._news),
        )

    def get(self, value: Any, timeout: float | None = None) -> Any:
        return value

    def nodes(self) -> list[dict[str, Any]]:
        both = zip(("n0", "n1"), self.alive, strict=True)
        return [{"NodeID": n, "Alive": alive, "Resources": {"CPU": 4.0}} for n, alive in both]

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}

    def shutdown(self) -> None:
        self.down = True
        self.died.set()
        self.waiting.put(None)
        self.waiting.put(None)

    def _news(self) -> list[dict[str, Any]]:
        found, self.told = self.told, []
        return found

    def start(self, front: cluster.Cluster) -> Any:
        """In place of Cluster._start."""
        if "load" in self.faults:
            self.told.append({"key": "k0", "failed": self.faults["load"]})
        threads = [threading.Thread(target=self._engine, args=(front, n)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        front._thread = threads[0]
        return self.mailbox

    def _engine(self, front: cluster.Cluster, node: int) -> None:
        taken, lives = 0, 1
        config = front._plan.config
        key = self._ready(config, node, lives)
        while (packet := self.waiting.get()) is not None and not self.down:
            message = json.loads(packet)
            taken += 1
            if node == 1 and taken == self.faults.get("lost_before"):
                self.alive[1] = False  # the packet was on its way to it
                return
            self.told.append({"key": key, "took": message["number"]})
            deaths = self.faults.get("dies_at", ())
            if node == 0 and deaths:
                self.died.wait(10)  # it would take the packets that are to kill the other one
            if node == 1 and taken >= max(deaths, default=0):
                self.died.set()
            if node == 1 and taken in deaths:
                lives += 1
                key = self._ready(config, node, lives)
                self.waiting.put(packet)  # Ray gives it out again
                continue
            engine = fake.FakeEngine(config)
            requests = [Request.from_json(each) for each in message["requests"]]
            results = [
                (r.request.request_id, r.request.sample_index, encode_result(r))
                for r in engine.run(requests)
            ]
            answer = {"number": message["number"], "key": key, "results": results}
            answer |= {"stats": engine.stats.to_json(), "at": float(taken)}
            if node == 1 and taken == self.faults.get("lost_at"):
                self.alive[1] = False
                self.late.append(answer)
                return
            front._results.put(answer)
            if node == 0 and self.late and taken % 3 == 0:
                front._results.put(self.late[-1])  # what was thought lost comes after all

    def _ready(self, config: EngineConfig, node: int, lives: int) -> str:
        about = {**describe(fake.FakeEngine(config)), "host": f"host{node}"}
        about["settings"]["max_model_len"] += self.faults.get("longer", 0) * node
        key = f"k{node}.{lives}"
        self.told.append({"key": key, "ready": about, "node": f"n{node}", "actor": f"a{node}"})
        return key


@pytest.fixture
def want(bench: Bench) -> tuple[bytes, bytes]:
    bench.write(ROWS)
    bench.generate(code=3)
    return bench.output.read_bytes(), bench.errors_file.read_bytes()


def on_cluster(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 3, **faults: Any
) -> str:
    ray = FakeRay(**faults)
    monkeypatch.setattr(cluster, "connect", lambda _address: ray)
    monkeypatch.setattr(cluster.Cluster, "_start", lambda front: ray.start(front))
    monkeypatch.setattr(cluster, "_NEWS_S", 0.02)
    monkeypatch.setattr(cluster, "_UNTAKEN_S", 0.1)
    given = ("--overwrite", "--cluster", "auto", "--max-num-seqs", "8", *args)
    text = bench.generate(*given, code=code).err
    assert ray.down
    return text


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({}, "an engine is ready on host"),
        ({"dies_at": (2, 5)}, "started again on host1 (2 of 2)"),
        ({"lost_at": 3}, "host1 is gone; its "),
        ({"lost_at": 1}, "host1 is gone; its "),
        ({"lost_before": 2}, "host1 is gone; its 0 unfinished rows"),
    ],
)
def test_rows_come_out_as_from_one_engine(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    want: tuple[bytes, bytes],
    faults: dict[str, Any],
    told: str,
) -> None:
    """Whoever dies, and though a lost node's results come in late: no row twice."""
    assert told in on_cluster(bench, monkeypatch, **faults)
    assert (bench.output.read_bytes(), bench.errors_file.read_bytes()) == want
    lines = [json.loads(line) for line in bench.journal.read_bytes().splitlines()]
    keys = [line["key"] for line in lines if line["type"] == "row"]
    assert len(keys) == len(set(keys)) == 64


def test_stdout_is_data_whatever_ray_prints(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, want: tuple[bytes, bytes]
) -> None:
    ray = FakeRay()
    monkeypatch.setattr(cluster, "connect", lambda _address: ray)
    whole = ray.start

    def start(front: cluster.Cluster) -> Any:
        print("(raylet) noise")
        return whole(front)

    monkeypatch.setattr(cluster.Cluster, "_start", start)
    given = ("generate", str(bench.input), "-o", "-", "-m", str(bench.folder / "m"))
    result = bench.call(*given, "-d", str(bench.folder / "d"), "--cluster", "auto")
    assert result.code == 3
    assert len([json.loads(line) for line in result.out.splitlines()]) == 65
    assert "(raylet) noise" in result.err


@pytest.mark.parametrize(
    ("faults", "code", "told"),
    [
        ({"dies_at": (1, 2, 3, 4)}, 1, "an engine on host1 ended 3 times"),
        ({"load": {"error": "no weights", "hint": "get them", "exit_code": 2}}, 2, "no weights"),
        ({"longer": 8}, 2, "give --max-model-len 200"),
    ],
)
def test_what_cannot_go_on_is_told(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    want: tuple[bytes, bytes],
    faults: dict[str, Any],
    code: int,
    told: str,
) -> None:
    assert told in on_cluster(bench, monkeypatch, code=code, **faults)


def test_without_ray_the_error_says_which_extra(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(ROWS)
    monkeypatch.setitem(sys.modules, "ray", None)
    text = bench.generate("--cluster", "auto", code=2).err
    assert "--cluster needs Ray, which is not installed" in text
    assert "pip install 'dspark[cluster]'" in text
    far = bench.generate("--cluster", "ray://head:10001", code=2).err
    assert "ray job submit" in far
    assert bench.generate("--cluster", "auto", "--dry-run", code=2).err == text
    assert bench.generate("--cluster", "ray://head:10001", "--dry-run", code=2).err == far


def test_an_address_where_nobody_listens_is_refused_before_ray_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = f"127.0.0.1:{server.getsockname()[1]}"
        check_answers(name, name, lambda: "127.0.0.1")
    for given in (name, "auto"):
        with pytest.raises(ConfigError, match=f"--cluster {given}: nothing answers at {name} \\("):
            check_answers(given, name, lambda: "127.0.0.1")
    with pytest.raises(ConfigError, match="nothing answers at localhost:99999"):
        check_answers("localhost:99999", "localhost:99999", lambda: "127.0.0.1")
    for left_to_ray in ("", "local", "auto", "head", "head:", "ray://head:1"):
        check_answers("auto", left_to_ray, lambda: "127.0.0.1")


def test_an_engine_that_died_shortly_before_the_end_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, want: tuple[bytes, bytes]
) -> None:
    ray = FakeRay(dies_at=(1,))
    monkeypatch.setattr(cluster, "connect", lambda _address: ray)

    def start(front: cluster.Cluster) -> Any:
        ray.mailbox.news = Remote(lambda: [] if front._waiting else ray._news())
        return ray.start(front)

    monkeypatch.setattr(cluster.Cluster, "_start", start)
    monkeypatch.setattr(cluster, "_NEWS_S", 0.02)
    text = bench.generate("--overwrite", "--cluster", "auto", "--max-num-seqs", "8", code=3).err
    assert "started again on host1 (1 of 2)" in text


def test_engines_are_laid_on_the_nodes() -> None:
    def plan(asked: int | None, nodes: list[dict[str, float]], **settings: Any) -> Any:
        found = plan_engines(EngineConfig(model="m", **settings), asked, nodes)
        return found.count, found.num_gpus, found.num_cpus, found.config.device

    gpus: list[dict[str, float]] = [{"GPU": 8, "CPU": 64}, {"GPU": 3, "CPU": 64}, {"CPU": 16}]
    assert plan(None, gpus) == (11, 1, 1, "cuda")
    assert plan(None, gpus, tensor_parallel_size=2) == (5, 2, 2, "cuda")
    assert plan(4, gpus) == (4, 1, 1, "cuda")
    assert plan(None, gpus, device="cpu") == (3, 0, 1, "cpu")
    with pytest.raises(ConfigError, match="needs 16 GPUs of one node; the nodes have"):
        plan(None, gpus, tensor_parallel_size=16)
    one: list[dict[str, float]] = [{"CPU": 2}]
    shared = plan_engines(EngineConfig(model="m"), 2, one)
    assert (shared.config.threads, shared.config.gpu_memory_utilization) == (1, 0.45)
    assert plan_engines(EngineConfig(model="m"), 1, one).config.threads is None
    assert plan_engines(EngineConfig(model="m", threads=4), 1, one).num_cpus == 4
    assert plan_engines(EngineConfig(model="m", device="cuda"), 1, gpus).rows_per_packet == 64
