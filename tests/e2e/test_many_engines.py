"""The packaged pair as shards and as replicas: what comes out is what one engine writes.

`DSPARK_FULL=1` takes 2,000 rows, `DSPARK_KILLS=10` kills that many replicas. Ray: test_cluster.py.
"""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from dspark_cli.main import run
from tests.cli.test_replicas import alive, children, kill_one
from tests.e2e import test_ranks as ranks
from tests.e2e.test_demo import heldout
from tests.helpers.command import Command

FULL = "DSPARK_FULL" in os.environ
COMMAND = (*ranks.COMMAND, "--max-num-seqs", "8")


def write_rows(folder: Path, count: int, max_tokens: int) -> None:
    """Greedy and sampled rows, conversations, several samples, and some that fail."""
    questions = [row["question"] for row in heldout()]
    with (folder / "in.jsonl").open("w") as stream:
        for at in range(count):
            question = questions[at % len(questions)]
            row: dict[str, Any] = {"id": f"row {at}", "max_tokens": max_tokens}
            row["messages"] = [{"role": "user", "content": question}]
            if at % 2:
                row |= {"temperature": 0.9, "top_p": 0.95, "seed": at}
            if at % 23 == 7:
                del row["messages"]
                row["turns"] = [question, "And twice as many?"]
            if at % 29 == 11:
                row["n"] = 2
            if at % 31 == 13:
                row = {"id": row["id"], "prompt": ""}
            stream.write(json.dumps(row) + "\n")


def dspark(*args: str) -> int:
    """The command in this process: engines of its own are loaded with what is imported already."""
    with pytest.raises(SystemExit) as info:
        run(list(args))
    return int(info.value.code or 0)


def files(folder: Path, name: str) -> tuple[bytes, bytes]:
    return (folder / f"{name}.jsonl").read_bytes(), (folder / f"{name}.errors.jsonl").read_bytes()


def test_shards_and_replicas_write_what_one_engine_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, greedy and sampled; one of the shards is made by two replicas."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, *((2000, 24) if FULL else (48, 12)))
    assert dspark(*COMMAND, "-o", "one.jsonl", "--metrics-json", "one.json") == 3
    two = ("--data-parallel-size", "2")
    count = 3 if FULL else 2
    for number in range(1, count + 1):
        ways = two if number == 2 else ()
        shard = ("--shard", f"{number}/{count}")
        assert dspark(*COMMAND, *shard, *ways, "-o", "s.jsonl", "--metrics-json", "s.json") in (
            0,
            3,
        )
    assert dspark("merge", "-o", "s.jsonl", "--metrics-json", "s.json", "--quiet") == 3
    assert files(tmp_path, "s") == files(tmp_path, "one")
    one, merged = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "s"))
    assert merged["rows"] == one["rows"]
    assert merged["acceptance"] == one["acceptance"]
    assert len(merged["manifest"]["engines"]) == count + 1
    if FULL:
        assert dspark(*COMMAND, *two, "-o", "two.jsonl") == 3
        assert files(tmp_path, "two") == files(tmp_path, "one")


@pytest.mark.skipif("DSPARK_KILLS" not in os.environ, reason="DSPARK_KILLS=10 kills ten replicas")
def test_killed_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 at random moments, two a run: the same output, no row twice, no process left."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 200, 64)
    assert dspark(*COMMAND, "-o", "one.jsonl") == 3
    rng, kills = random.Random(7), 0
    while kills < int(os.environ["DSPARK_KILLS"]):
        (tmp_path / "k.journal").unlink(missing_ok=True)
        (tmp_path / "k.jsonl").unlink(missing_ok=True)
        command = (*COMMAND, "--data-parallel-size", "2", "-o", "k.jsonl")
        with Command(*command, cwd=tmp_path) as process:
            pids = set()
            for _ in range(2):
                ranks.wait_for_rows(process, tmp_path / "k.journal", rng.randrange(60))
                time.sleep(rng.uniform(0.0, 0.2))
                here = children(process.pid)
                pids |= {*here, kill_one(process.pid, rng.choice(here))}
                kills += 1
            assert process.wait(timeout=300) == 3
        assert files(tmp_path, "k") == files(tmp_path, "one")
        lines = (tmp_path / "k.journal").read_bytes().splitlines()
        keys = [r["key"] for r in map(json.loads, lines) if r["type"] == "row"]
        assert len(keys) == len(set(keys)), "a row was made twice"
        assert not any(alive(pid) for pid in pids)
