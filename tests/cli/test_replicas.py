"""--data-parallel-size: what replicas write is what one engine writes, whoever dies."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from dspark_cli import replica, replicas
from dspark_cli.parts import Share, share_out
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.feed import Feed
from engine.telemetry import EngineStats, ScheduleStats, merge
from tests.cli import fake
from tests.cli.conftest import Bench
from tests.cli.test_crash import Process

TWO = ("--data-parallel-size", "2", "--max-num-seqs", "2", "--device", "cpu")
ROWS: list[Any] = [
    *({"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(30)),
    b"not json",
    {"id": "several", "prompt": "x", "n": 3, "temperature": 1},
    {"id": "long", "prompt": "y" * 300},
    {"id": "fails", "prompt": "FAIL_oom"},
    {"id": "turns", "turns": ["one", "two", "three"]},
]


@pytest.fixture
def many(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(replicas, "MAIN", "tests.cli.fake:replica")
    return bench


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_one(parent: int, victim: int) -> int:
    """kill -9 of a replica; the process that is started in its place."""
    before = children(parent)
    os.kill(victim, signal.SIGKILL)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if new := [pid for pid in children(parent) if pid not in before]:
            return new[0]
        time.sleep(0.01)
    raise AssertionError(f"it was not started again; the run goes on: {alive(parent)}")


def ids_made(bench: Bench) -> list[str]:
    records = [json.loads(line) for line in bench.journal.read_bytes().splitlines()]
    return [str(record["row"]["id"]) for record in records if record["type"] == "row"]


def test_two_replicas_write_what_one_engine_writes(many: Bench) -> None:
    """Rows of all kinds, errors and sums of metrics included; this process has no engine."""
    metrics = many.folder / "metrics.json"
    many.write(ROWS)
    many.generate("--max-num-seqs", "2", "--metrics-json", str(metrics), code=3)
    want = many.output.read_bytes(), many.errors_file.read_bytes()
    of_one = json.loads(metrics.read_text())
    loads = fake.FakeEngine.loads
    many.generate(*TWO, "--overwrite", "--metrics-json", str(metrics), code=3)
    assert (many.output.read_bytes(), many.errors_file.read_bytes()) == want
    assert fake.FakeEngine.loads == loads
    of_two = json.loads(metrics.read_text())
    for name in ("rows", "acceptance", "schedule"):
        assert of_two[name] == of_one[name], name
    assert of_two["engine"]["output_tokens"] == of_one["engine"]["output_tokens"]
    assert [e["settings"]["max_num_seqs"] for e in of_two["manifest"]["engines"]] == [2, 2]
    assert all(
        e["host"] and e["device"] and e["packages"]["torch"] for e in of_two["manifest"]["engines"]
    )
    many.write(ROWS[:1])  # fewer rows than replicas
    many.generate(*TWO, "--overwrite")
    assert not children(os.getpid())


@pytest.fixture
def killed(many: Bench) -> tuple[Bench, bytes]:
    """Rows, and what an undisturbed run writes."""
    many.write(ROWS[:30])
    many.generate("--draft", "none")
    want = many.output.read_bytes()
    many.output.unlink()
    many.journal.unlink()
    return many, want


@pytest.mark.parametrize("kills", [int(os.environ.get("DSPARK_KILLS", "2"))])
def test_killed_replicas_are_started_again_and_no_row_is_made_twice(
    killed: tuple[Bench, bytes], kills: int
) -> None:
    """Twice the same one, or DSPARK_KILLS runs: the others go on, and the output is the same."""
    bench, want = killed
    for turn in range(max(1, kills // 2)):
        metrics = bench.folder / "metrics.json"
        process = Process(bench, *TWO, "--metrics-json", str(metrics), delay=0.03)
        process.wait_for_rows(2 + turn % 5)
        for _ in range(2):
            kill_one(process.popen.pid, children(process.popen.pid)[turn % 2])
            time.sleep(0.05)
        code, text = process.end()
        assert code == 0, text
        assert "was ended by SIGKILL; its " in text
        assert bench.output.read_bytes() == want
        assert sorted(ids_made(bench)) == sorted(row["id"] for row in ROWS[:30])
        found = json.loads(metrics.read_text())
        tokens = sum(len(json.loads(line)["token_ids"]) for line in want.splitlines())
        assert found["speed"]["output_tokens"] == tokens, "those that were lost are not output"
        bench.output.unlink()
        bench.journal.unlink()


def test_a_replica_that_keeps_dying_ends_the_run_and_loses_nothing(
    killed: tuple[Bench, bytes],
) -> None:
    """As a row does that kills whoever runs it; the same command goes on afterwards."""
    bench, want = killed
    process = Process(bench, *TWO, delay=0.1)
    process.wait_for_rows(1)
    victims = children(process.popen.pid)
    victims.append(kill_one(process.popen.pid, victims[1]))
    victims.append(kill_one(process.popen.pid, victims[-1]))
    os.kill(victims[-1], signal.SIGKILL)
    code, text = process.end()
    assert code == 1
    assert "was ended by SIGKILL (3 times now)" in text
    assert "run the same command again" in text
    assert not any(alive(pid) for pid in victims)
    done = len(ids_made(bench))
    assert done >= 1
    bench.generate("--draft", "none", *TWO)
    assert bench.output.read_bytes() == want
    assert len(ids_made(bench)) == 30


def test_replicas_end_with_their_parent_and_leave_ctrl_c_to_it(
    killed: tuple[Bench, bytes],
) -> None:
    bench, want = killed
    process = Process(bench, *TWO, delay=0.05)
    process.wait_for_rows(2)
    victims = children(process.popen.pid)
    assert len(victims) == 2
    process.popen.kill()
    process.end()
    until = time.monotonic() + 5
    while any(alive(pid) for pid in victims) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in victims)
    process = Process(bench, *TWO, delay=0.05)
    process.wait_for_rows(4)
    victims = children(process.popen.pid)
    for pid in (*victims, process.popen.pid):  # a terminal, or scancel, tells everybody
        os.kill(pid, signal.SIGTERM if pid != process.popen.pid else signal.SIGINT)
    code, text = process.end()
    assert code == 130, text
    assert "running rows get 10 s to end" in text
    assert not any(alive(pid) for pid in victims)
    bench.generate("--draft", "none")
    assert bench.output.read_bytes() == want
    assert len(ids_made(bench)) == 30


@pytest.mark.parametrize("sent", [b"", b'{"requests": []}\n', b'{"requests": [{"half a'])
def test_a_connection_that_is_reset_has_ended(sent: bytes) -> None:
    """An end that closes with something unread resets the other one, which is no error there."""
    ours, theirs = socket.socketpair()
    connection, feed = replica.Connection(theirs), Feed()
    connection.send({"stats": "nobody reads this"})
    ours.sendall(sent)
    ours.close()
    replica._listen(connection, feed)
    with pytest.raises(StopIteration):
        next(feed)
    connection.send({"stats": "nor this"})
    theirs.close()
    ours, theirs = socket.socketpair()
    member = replicas._Member(0, Share(EngineConfig(model="m")), None)
    member.connection = ours
    member.send([])
    theirs.close()
    assert member.read() is None
    member.send([])
    ours.close()


@pytest.mark.parametrize(
    ("name", "code", "told", "hint"),
    [
        ("unloadable", 2, "weights are missing", "get them"),
        ("crowded", 1, "there is no room", "make some"),
    ],
)
def test_what_cannot_be_loaded_is_told_once_and_not_tried_again(
    many: Bench, name: str, code: int, told: str, hint: str
) -> None:
    """Without memory for the KV of a context every engine was loaded three times to be told so."""
    many.write(ROWS[:3])
    folder = many.folder / name
    (many.folder / "m").rename(folder)
    result = many.call(
        "generate", str(many.input), "-o", str(many.output), "-m", str(folder), "-d", "none", *TWO
    )
    assert result.code == code
    assert told in result.err
    assert f"hint: {hint}\n" in result.err
    assert "started again" not in result.err
    assert result.err.count("error:") == 1


def test_an_engine_that_breaks_is_told_with_its_own_error(many: Bench) -> None:
    many.write([{"prompt": "RAISE"}])
    text = many.generate(*TWO, code=1).err
    assert "RuntimeError: the engine broke (3 times now)" in text
    # one twice, the other once or twice: the row goes to the one that is ready first
    assert text.count("it is started again") in (3, 4)


@pytest.mark.parametrize("args", [["--trace", "t.json"], ["--compare-plain"]])
@pytest.mark.parametrize("way", [TWO, ("--cluster", "local"), ("--cluster", "local", *TWO)])
def test_what_one_engine_alone_can_do_is_refused(
    many: Bench, args: list[str], way: tuple[str, ...]
) -> None:
    many.write(ROWS[:1])
    text = many.generate(*way, *args, code=2).err
    assert "one engine" in text
    assert f"hint: drop {args[0]} or {way[0]}" in text


@pytest.mark.parametrize("args", [[], ["--dry-run"]])
def test_more_engines_than_cores_are_refused_before_anything_starts(
    many: Bench, args: list[str]
) -> None:
    many.write(ROWS[:1])
    before = sorted(many.folder.iterdir())
    text = many.generate("-dp", "999", "--device", "cpu", *args, code=2).err
    assert "--data-parallel-size 999: 999 engines need 999 cores, this host has" in text
    assert "hint: lower --data-parallel-size" in text
    assert sorted(many.folder.iterdir()) == before


def test_devices_cores_and_memory_are_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(5)))
    shares = share_out(EngineConfig(model="m", device="cpu"), 2)
    assert [share.cores for share in shares] == [[0, 1], [2, 3, 4]]
    assert shares[0].config.gpu_memory_utilization == 0.45
    with pytest.raises(ConfigError, match="6: 6 engines need 6 cores, this host has 5"):
        share_out(EngineConfig(model="m", device="cpu"), 6)
    with pytest.raises(ConfigError, match="3: 3 engines with -tp 2 need 6 cores, this host has 5"):
        share_out(EngineConfig(model="m", device="cpu", tensor_parallel_size=2), 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,GPU-a,7")
    pairs = share_out(EngineConfig(model="m", tensor_parallel_size=2), 2)
    assert [share.env["CUDA_VISIBLE_DEVICES"] for share in pairs] == ["3,5", "GPU-a,7"]
    with pytest.raises(ConfigError, match="needs 6 CUDA devices, there are 4"):
        share_out(EngineConfig(model="m", tensor_parallel_size=2), 3)


def test_statistics_of_engines_add_up() -> None:
    a = EngineStats(
        rounds=2,
        accepted_at=[1, 0],
        seconds={"load": 1.0, "draft": 0.5},
        max_num_batched_tokens=8,
        kv_account="a",
        schedule=ScheduleStats(rounds={"plain": 1, "full": 2, "compact": 0}, tokens=4),
    )
    b = EngineStats(rounds=3, accepted_at=[1, 2], seconds={"draft": 0.5}, max_num_batched_tokens=4)
    total = merge([a, EngineStats.from_json(json.loads(json.dumps(b.to_json())))])
    assert (total.rounds, total.accepted_at) == (5, [2, 2])
    assert total.seconds == {"load": 1.0, "draft": 1.0}
    assert (total.max_num_batched_tokens, total.kv_account) == (8, "a")
    assert total.schedule.rounds == {"plain": 1, "full": 2, "compact": 0}
    assert merge([a]) == a


@pytest.mark.parametrize(
    ("share", "spare"), [(10_000, 64), (128, 64), (100, 50), (32, 16), (0, 16), (None, 16)]
)
def test_a_replica_has_as_many_more_as_it_runs_but_few_towards_the_end(
    share: int | None, spare: int
) -> None:
    """Rows of one length end all at once: a whole batch has to be there already."""
    member = replicas._Member(0, share_out(EngineConfig(model="demo", device="cpu"), 1)[0], None)
    assert member.room(share) == 0, "it still loads"
    member.about = {"settings": {"max_num_seqs": 64}}
    assert member.room(share) == 64 + spare


def test_what_is_to_come_is_what_nobody_has_yet(
    many: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an earlier run counted as to come: near the end a replica took all that was left."""
    many.write(ROWS[:30])
    many.generate("--limit", "24", "--max-num-seqs", "2", "--draft", "none")
    shares: list[int | None] = []
    real = replicas._Member.room

    def room(self: replicas._Member, share: int | None) -> int:
        shares.append(share)
        return real(self, share)

    monkeypatch.setattr(replicas._Member, "room", room)
    many.generate(*TWO)
    seen = list(dict.fromkeys(shares))
    assert seen[0] == 3
    assert seen == sorted((s for s in seen if s is not None), reverse=True)
    assert seen[-1] == 0
