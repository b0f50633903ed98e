"""The packaged pair on several processes, through the command: same output, killed, interrupted."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_demo import heldout, run_command
from tests.helpers.distributed import Ranks, run_ranks
from tests.helpers.engines import make_engine, outputs, requests

pytestmark = pytest.mark.alone
FULL = "DSPARK_FULL" in os.environ
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"id": i, "messages": [{"role": "user", "content": r["question"]}]}
        for i, r in enumerate(heldout()[:70])
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
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


def test_rule_1_and_2_64_prompts_on_several_ranks() -> None:
    """Greedy and seeded, drafted at owners or everywhere: token for token what one rank gives."""
    alone = make_engine(DEMO / "target", DEMO / "drafter", **LIMITS)
    rows = heldout()
    chats = [
        alone.tokenizer.encode_chat([{"role": "user", "content": rows[i % len(rows)]["question"]}])
        for i in range(64)
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


@contextmanager
def started(folder: Path, *args: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "dspark_cli", *COMMAND, *SHORT, *args],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_rows(process: "subprocess.Popen[str]", journal: Path, beyond: int) -> None:
    """Until rows are added; a resumed run first adds up to two lines of settings."""
    deadline = time.monotonic() + 90
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > beyond + 2:
            return
        time.sleep(0.02)


@pytest.mark.parametrize("kills", [int(os.environ.get("DSPARK_KILLS", "2"))])
def test_a_killed_rank_ends_the_run_and_loses_nothing(folder: Path, kills: int) -> None:
    """kill -9 of a rank, rank 0 too: over within 10 s, told, no process left, rows resumed."""
    whole = run_command(*COMMAND, *SHORT, "-o", "whole.jsonl", cwd=folder)
    assert whole.returncode == 0, whole.stderr
    rng, journal, lines = random.Random(4), folder / "killed.journal", 1
    for turn in range(kills):
        with started(folder, "-tp", "2", "-o", "killed.jsonl") as process:
            wait_for_rows(process, journal, lines)
            time.sleep(rng.uniform(0.0, 0.2))
            ranks = children(process.pid)
            assert len(ranks) == 1, "the run was too short to be killed"
            os.kill(ranks[0] if turn % 2 == 0 else process.pid, signal.SIGKILL)
            begin = time.monotonic()
            code = process.wait(timeout=20)
            assert time.monotonic() - begin < 10.0
            assert process.stderr is not None
            said = process.stderr.read()
        assert code == (1 if turn % 2 == 0 else -signal.SIGKILL)
        assert ("error: rank 1 was ended by SIGKILL" in said) == (turn % 2 == 0)
        while alive(ranks[0]) and time.monotonic() - begin < 10.0:
            time.sleep(0.02)
        assert not alive(ranks[0])
        kept = journal.read_bytes().count(b"\n")
        assert kept >= lines, "a finished row was lost"
        lines = kept
    last = run_command(*COMMAND, *SHORT, "-tp", "2", "-o", "killed.jsonl", cwd=folder)
    assert last.returncode == 0, last.stderr
    assert (folder / "killed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


def test_ctrl_c_stops_all_ranks_and_a_second_one_at_once(folder: Path) -> None:
    journal = folder / "out.journal"
    for times in (1, 2):
        beyond = journal.read_bytes().count(b"\n") if journal.exists() else 1
        with started(folder, "-tp", "2", "-o", "out.jsonl", "--grace", "60") as process:
            wait_for_rows(process, journal, beyond)
            ranks = children(process.pid)
            for _ in range(times):
                for pid in (*ranks, process.pid):  # a terminal tells the whole group
                    os.kill(pid, signal.SIGINT)
                time.sleep(0.1)
            assert process.wait(timeout=30) == 130
            assert process.stderr is not None
            assert "interrupted" in process.stderr.read()
        assert not any(alive(pid) for pid in ranks)


def test_a_rank_that_cannot_load_is_told_with_its_own_error(folder: Path) -> None:
    """Rank 1 fails by itself: its message is on the screen, and its traceback for --debug only."""
    code = (
        "import sys, engine.dist.parent as p; from dspark_cli.main import run\n"
        "broken = 'import engine.runner.steps as s; s.Steps.shards = None; '\n"
        "whole = p.boot_code\n"
        "import engine.dist.launch as l\n"
        "l.boot_code = lambda: whole().replace('from engine.fol', broken + 'from engine.fol')\n"
        "run(sys.argv[1:])"
    )
    for debug in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", code, *COMMAND, "-tp", "2", "-o", f"{debug}.jsonl"]
            + ["--debug"] * debug,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 1
        assert "rank 1: TypeError: 'NoneType' object is not callable" in done.stderr
        assert ("Traceback" in done.stderr) == debug


def test_under_torchrun_the_other_ranks_serve_rank_0(folder: Path) -> None:
    alone = run_command(*COMMAND, *SHORT, "--limit", "6", "-o", "alone.jsonl", cwd=folder)
    assert alone.returncode == 0, alone.stderr
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
    assert (folder / "together.jsonl").read_bytes() == (folder / "alone.jsonl").read_bytes()


@pytest.mark.parametrize("size", ["2", "3"])
def test_heads_decide_how_many_ranks_there_can_be(folder: Path, size: str) -> None:
    """4 KV heads: two ranks hold two each; three cannot. Refused before anything is started."""
    done = run_command(*COMMAND, *SHORT, "--limit", "1", "-o", "out.jsonl", "-tp", size, cwd=folder)
    if size == "2":
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("the draft loop") == 1, "why it is or is not shared out, once"
        return
    assert done.returncode == 2
    assert "-tp 3: the target has 8 heads and 4 KV heads" in done.stderr
    assert "use -tp 1, 2, 4 or 8" in done.stderr


def test_bench_collectives_times_every_exchange(folder: Path) -> None:
    command = ("bench", "collectives", "-m", "demo", "-tp", "2", "--device", "cpu")
    done = run_command(*command, "--requests", "1,3", "--output-json", "o.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "o.json").read_text())
    assert found["made_by"] == "gloo"
    rows = {(e["name"], e["num_reqs"]): e for e in found["exchanges"]}
    # 7 rows a request; each rank lacks half of the 1024 columns, float32
    assert rows["base logits, all-gather", 3]["num_bytes"] == 3 * 7 * 512 * 4
    assert rows["base logits, all-to-all", 3]["num_bytes"] == 2 * 7 * 512 * 4, "of its own rows"
    assert rows["hidden, all-reduce", 1]["num_bytes"] == 8 * 256 * 4
    assert all(e["microseconds"] > 0 for e in rows.values())
    assert len(rows) == 9
    alone = run_command(*command[:4], "--device", "cpu", cwd=folder)
    assert alone.returncode == 2
    assert "give -tp 2 or more" in alone.stderr


def test_a_file_that_rank_0_alone_reads_and_refuses_ends_all_ranks(folder: Path) -> None:
    """The others waited for what it would tell, and it for them: nobody ended."""
    command = [*COMMAND, "--limit", "1", "-o", "out.jsonl", "-tp", "2"]
    command[command.index("all")] = "lagged"
    done = run_command(*command, "--cost-table", "in.jsonl", cwd=folder, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "--cost-table in.jsonl" in done.stderr
