"""The packaged pair on a Ray cluster: what comes out is what one engine writes.

Needs the extra `cluster`. `DSPARK_FULL=1`: 2,000 rows. `DSPARK_KILLS=10`: that many actors killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.test_replicas import alive
from tests.e2e.test_demo import ROOT
from tests.e2e.test_many_engines import COMMAND, FULL, files, write_rows

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[cluster]'"
    ),
]
TWO = ("--data-parallel-size", "2")
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
here = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = here.add_node(num_cpus=1)
print(here.address, flush=True)
for line in sys.stdin:
    if line != "remove\\n":
        break
    here.remove_node(other, allow_graceful=False)
here.shutdown()
"""


class TwoNodes:
    """A cluster of two nodes with one CPU each, on this host."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def lose_a_node(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("remove\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        self._process.communicate("stop\n", timeout=60)


def command(folder: Path, *args: str) -> "subprocess.Popen[str]":
    """In a process of its own: Ray warns, and this one takes warnings for errors."""
    with (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "dspark_cli", *COMMAND, *args],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


def finish(folder: Path, *args: str) -> str:
    """Run the command to its end: what it has put on stdout."""
    with command(folder, *args) as process:
        out, _ = process.communicate(timeout=500)
        assert process.returncode == 3, (folder / "stderr").read_text()
        return out


@contextmanager
def started(folder: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    with command(folder, *args) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_rows(process: "subprocess.Popen[str]", journal: Path, beyond: int) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > beyond + 2:
            return
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows, and what one engine writes of them."""
    write_rows(tmp_path, *((2000, 24) if FULL else (160, 48)))
    finish(tmp_path, "-o", "one.jsonl", "--metrics-json", "one.json")
    return tmp_path


def processes(title: str) -> list[int]:
    """Ray's, by the beginning of what they are called."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(title.encode()):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 30
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in pids if alive(pid)]


def rows_made(journal: Path) -> list[str]:
    records = map(json.loads, journal.read_bytes().splitlines())
    return [record["key"] for record in records if record["type"] == "row"]


def test_a_cluster_writes_what_one_engine_writes(folder: Path) -> None:
    """Greedy and sampled, errors and sums of metrics, with all kinds of rows; stdout is data."""
    ways = ("--cluster", "local", *TWO)
    assert finish(folder, *ways, "-o", "c.jsonl", "--metrics-json", "c.json") == ""
    assert files(folder, "c") == files(folder, "one")
    one, both = (json.loads((folder / f"{name}.json").read_text()) for name in ("one", "c"))
    assert both["rows"] == one["rows"]
    assert both["acceptance"] == one["acceptance"]
    about = both["manifest"]["engines"]
    assert len(about) == 2
    assert all(e["host"] and e["device"] and e["ray"] and e["packages"]["torch"] for e in about)
    assert about[0]["pid"] != about[1]["pid"]
    wait_until_gone(processes("ray::"))


@pytest.mark.parametrize("kills", [int(os.environ.get("DSPARK_KILLS", "2"))])
def test_killed_actors(folder: Path, kills: int) -> None:
    """kill -9 at random moments, two a run: the same output, no row twice, no process left."""
    rng, done = random.Random(5), 0
    while done < kills:
        for name in ("k.journal", "k.jsonl"):
            (folder / name).unlink(missing_ok=True)
        ways = ("--cluster", "local", *TWO, "--max-num-seqs", "4")
        with started(folder, *ways, "-o", "k.jsonl") as process:
            seen: set[int] = set()
            for turn in range(2):
                wait_for_rows(process, folder / "k.journal", rng.randrange(20) + 40 * turn)
                time.sleep(rng.uniform(0.0, 0.2))
                assert process.poll() is None, "the run was too short to be killed"
                here = processes("ray::MapWorker")
                seen |= set(here)
                os.kill(rng.choice(here), signal.SIGKILL)
                done += 1
            assert process.wait(timeout=300) == 3
        assert files(folder, "k") == files(folder, "one")
        keys = rows_made(folder / "k.journal")
        assert len(keys) == len(set(keys)), "a row was made twice"
        wait_until_gone([*seen, *processes("ray::")])


def test_rows_of_a_lost_node_run_again(folder: Path) -> None:
    """There is no room for another engine elsewhere: the one that is left makes them."""
    nodes = TwoNodes()
    try:
        ways = ("--cluster", nodes.address, "--max-num-seqs", "4")
        with started(folder, *ways, "-o", "n.jsonl") as process:
            wait_for_rows(process, folder / "n.journal", 10)
            nodes.lose_a_node()
            assert process.wait(timeout=300) == 3
            assert "is gone; its " in (folder / "stderr").read_text()
    finally:
        nodes.stop()
    assert files(folder, "n") == files(folder, "one")
    keys = rows_made(folder / "n.journal")
    assert len(keys) == len(set(keys)), "a row was made twice"
    wait_until_gone(processes("ray::"))


def test_a_cluster_that_is_stopped_and_started_again_goes_on(folder: Path) -> None:
    nodes = TwoNodes()
    ways = ("--max-num-seqs", "4", "-o", "s.jsonl")
    with started(folder, "--cluster", nodes.address, *ways) as process:
        wait_for_rows(process, folder / "s.journal", 10)
        nodes.stop()
        assert process.wait(timeout=120) == 1  # Ray ends the process of a driver without a cluster
    before = rows_made(folder / "s.journal")
    assert before
    assert not (folder / "s.jsonl").exists()
    nodes = TwoNodes()
    try:
        finish(folder, "--cluster", nodes.address, *ways)
    finally:
        nodes.stop()
    assert files(folder, "s") == files(folder, "one")
    keys = rows_made(folder / "s.journal")
    assert keys[: len(before)] == before
    assert len(keys) == len(set(keys)), "a row was made twice"
    wait_until_gone(processes("ray::"))
