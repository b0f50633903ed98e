"""The packaged pair on several processes, through the command: same output, killed, interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_demo import heldout
from tests.helpers.command import Command, run_command, run_forked
from tests.helpers.distributed import Ranks, run_ranks
from tests.helpers.engines import make_engine, outputs, requests

FULL = "DSPARK_FULL" in os.environ
KILLS = int(os.environ.get("DSPARK_KILLS", "2"))
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
LIMITS: dict[str, Any] = {
    "max_num_seqs": 11,
    "max_model_len": 512,
    "kv_block_size": 16,
    "kv_cache_memory_bytes": 32 << 20,
}
COMMAND = ("generate", "in.jsonl", "--model", "demo", "--device", "cpu", "--threads", "1")
COMMAND += ("--verify", "all")  # rounds, and what is told of them, do not depend on measured costs
SHORT = ("--max-tokens", "96", "--max-num-seqs", "3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.jsonl and whole.jsonl, of one process."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [
        {"id": i, "messages": [{"role": "user", "content": r["question"]}]}
        for i, r in enumerate(heldout()[: 12 * max(KILLS, 3)])
    ]
    (folder / "in.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    done = run_command(*COMMAND, *SHORT, "-o", "whole.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(tmp_path: Path, whole: Path) -> Path:
    """An empty one, but for both files."""
    for name in ("in.jsonl", "whole.jsonl"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    return tmp_path


def same_as_alone(ranks: Ranks, cases: list[tuple[str, Any, Any]]) -> None:
    for loop, many, want in cases:
        group = ranks.group()
        engine = make_engine(
            DEMO / "target", DEMO / "drafter", group=group, sharded_loop=loop, **LIMITS
        )
        if ranks.rank:
            engine.mirror()
            continue
        assert outputs(engine, many) == want, loop
        assert engine.stats.acceptance_length > 3.0
        engine.close()


def test_rule_1_and_2_many_prompts_on_several_ranks() -> None:
    """Greedy and seeded, drafted at owners or everywhere: token for token what one rank gives."""
    alone = make_engine(DEMO / "target", DEMO / "drafter", **LIMITS)
    rows = heldout()
    chats = [
        alone.tokenizer.encode_chat([{"role": "user", "content": rows[i % len(rows)]["question"]}])
        for i in range(64 if FULL else 24)  # 11 at once: some wait, and take rows that others had
    ]
    cases = []
    for sampling in ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}):
        many = requests(chats, max_tokens=20, **sampling)
        want = outputs(alone, many)
        cases += [(loop, many, want) for loop in ("on", "off")]
    # greedy sharded and seeded everywhere; DSPARK_FULL: all of them, on four ranks as well
    run_ranks(same_as_alone, 2, cases if FULL else [cases[0], cases[3]], timeout=240)
    if FULL:
        run_ranks(same_as_alone, 4, cases, timeout=240)


def children(pid: int) -> list[int]:
    """Processes that `pid` has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_rows(process: Command, journal: Path, beyond: int) -> None:
    """Until rows are added; a resumed run first adds up to two lines of settings."""
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > beyond + 2:
            return
        time.sleep(0.02)


def test_a_killed_rank_ends_the_run_and_loses_nothing(folder: Path) -> None:
    """kill -9 of a rank, rank 0 too: over within 10 s, told, no process left, rows resumed."""
    rng, journal, lines = random.Random(4), folder / "killed.journal", 1
    command = (*COMMAND, *SHORT, "-tp", "2", "-o", "killed.jsonl")
    for turn in range(KILLS):
        with Command(*command, cwd=folder) as process:
            wait_for_rows(process, journal, lines)
            time.sleep(rng.uniform(0.0, 0.2))
            ranks = children(process.pid)
            assert len(ranks) == 1, "the run was too short to be killed"
            os.kill(ranks[0] if turn % 2 == 0 else process.pid, signal.SIGKILL)
            begin = time.monotonic()
            code = process.wait(timeout=20)
            assert time.monotonic() - begin < 10.0
            said = process.stderr
        assert code == (1 if turn % 2 == 0 else -signal.SIGKILL)
        assert ("error: rank 1 was ended by SIGKILL" in said) == (turn % 2 == 0)
        while alive(ranks[0]) and time.monotonic() - begin < 10.0:
            time.sleep(0.02)
        assert not alive(ranks[0])
        kept = journal.read_bytes().count(b"\n")
        assert kept >= lines, "a finished row was lost"
        lines = kept
    last = run_forked(*command, cwd=folder)
    assert last.returncode == 0, last.stderr
    assert last.stderr.count("the draft loop") == 1, "why it is or is not shared out, once"
    assert (folder / "killed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_ctrl_c_stops_all_ranks_and_a_second_one_at_once(folder: Path) -> None:
    journal = folder / "out.journal"
    for times in (1, 2):
        beyond = journal.read_bytes().count(b"\n") if journal.exists() else 1
        command = (*COMMAND, *SHORT, "-tp", "2", "-o", "out.jsonl", "--grace", "60")
        with Command(*command, cwd=folder) as process:
            wait_for_rows(process, journal, beyond)
            ranks = children(process.pid)
            for _ in range(times):
                for pid in (*ranks, process.pid):  # a terminal tells the whole group
                    os.kill(pid, signal.SIGINT)
                time.sleep(0.1)
            assert process.wait(timeout=30) == 130
            assert "interrupted" in process.stderr
        assert not any(alive(pid) for pid in ranks)


def break_rank_1() -> None:
    """Have the processes of other ranks load with a part of the engine missing."""
    from engine import child

    broken = "import engine.runner.steps as s; s.Steps.shards = None; "
    whole = child.boot_code("engine.follower:main")
    code = whole.replace("from engine.fol", broken + "from engine.fol")
    child.boot_code = lambda _main: code


def test_a_rank_that_cannot_load_is_told_with_its_own_error(folder: Path) -> None:
    """Rank 1 fails by itself: its message is on the screen, and its traceback for --debug only."""
    for debug in ((), ("--debug",)):
        command = (*COMMAND, "-tp", "2", "-o", f"{len(debug)}.jsonl", *debug)
        done = run_forked(*command, cwd=folder, before=break_rank_1)
        assert done.returncode == 1
        assert "rank 1: TypeError: 'NoneType' object is not callable" in done.stderr
        assert ("Traceback" in done.stderr) == bool(debug)


def give_rank_1_another_tier() -> None:
    """Have the processes of other ranks change each plan that they are told."""
    from engine import child

    broken = (
        "import dataclasses, engine.planning as p; tell = p.Decisions._tell; "
        "p.Decisions._tell = lambda *a: dataclasses.replace(tell(*a), tokens=99); "
    )
    whole = child.boot_code("engine.follower:main")
    code = whole.replace("from engine.fol", broken + "from engine.fol")
    child.boot_code = lambda _main: code


def test_ranks_that_differ_end_with_one_readable_error(folder: Path) -> None:
    """Rank 1 makes another tier of the plan it is told; --audit is there before it is used."""
    command = (*COMMAND, *SHORT, "-tp", "2", "--audit", "-o", "differ.jsonl")
    done = run_forked(*command, cwd=folder, before=give_rank_1_another_tier)
    assert done.returncode == 1
    assert (
        "error: the ranks do not carry out the same rounds: in round 1 the tier of tokens is "
        "24 on rank 0, 99 on rank 1\n" in done.stderr
    )
    assert done.stderr.count("error:") == 1


def test_under_torchrun_the_other_ranks_serve_rank_0(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "-m", "dspark_cli"]
    for args in (("-o", "together.jsonl"), *([("--dry-run",)] if FULL else [])):
        done = subprocess.run(
            [*torchrun, *COMMAND, *SHORT, "--limit", "6", *args],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
    alone = (folder / "whole.jsonl").read_bytes().splitlines()
    assert (folder / "together.jsonl").read_bytes().splitlines() == alone[:6]


@pytest.mark.parametrize("size", ["2", "3"])
def test_heads_decide_how_many_ranks_there_can_be(folder: Path, size: str) -> None:
    """4 KV heads: two ranks hold two each; three cannot. Refused before anything is started."""
    more = ("--audit", "--metrics-json", "m.json")
    done = run_command(
        *COMMAND, *SHORT, "--limit", "1", "-o", "out.jsonl", "-tp", size, *more, cwd=folder
    )
    if size == "2":
        assert done.returncode == 0, done.stderr
        found = json.loads((folder / "m.json").read_text())["schedule"]
        assert found["audits"] == found["plans_told"] == sum(found["rounds_by_path"].values()) > 0
        assert 0 < found["plan_exposed_seconds"] == found["plan_seconds"] < 1
        assert done.stderr.count("the draft loop") == 1, "why it is or is not shared out, once"
        return
    assert done.returncode == 2
    assert "-tp 3: the target has 8 heads and 4 KV heads" in done.stderr
    assert "use -tp 1, 2, 4 or 8" in done.stderr


def test_bench_collectives_times_every_exchange(tmp_path: Path) -> None:
    command = ("bench", "collectives", "-m", "demo", "-tp", "2", "--device", "cpu")
    done = run_forked(*command, "--requests", "1,3", "--output-json", "o.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["made_by"] == "gloo"
    rows = {(e["name"], e["num_reqs"]): e for e in found["exchanges"]}
    # 7 rows a request; each rank lacks half of the 1024 columns, float32
    assert rows["base logits, all-gather", 3]["num_bytes"] == 3 * 7 * 512 * 4
    assert rows["base logits, all-to-all", 3]["num_bytes"] == 2 * 7 * 512 * 4, "of its own rows"
    assert rows["hidden, all-reduce", 1]["num_bytes"] == 8 * 256 * 4
    assert all(e["microseconds"] > 0 for e in rows.values())
    assert rows["hidden, sum and norm, gloo", 1]["num_bytes"] == 8 * 256 * 4
    assert len(rows) == 11
    alone = run_command(*command[:4], "--device", "cpu", cwd=tmp_path)
    assert alone.returncode == 2
    assert "give -tp 2 or more" in alone.stderr


def test_a_file_that_rank_0_alone_reads_and_refuses_ends_all_ranks(folder: Path) -> None:
    """The others waited for what it would tell, and it for them: nobody ended."""
    command = [*COMMAND, "--limit", "1", "-o", "out.jsonl", "-tp", "2"]
    command[command.index("all")] = "lagged"
    done = run_forked(*command, "--cost-table", "in.jsonl", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "--cost-table in.jsonl" in done.stderr
