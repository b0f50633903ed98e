"""Do all ranks carry out one plan? Batches x workloads x schedules x processes, all with --audit.

    python examples/plan_matrix.py --jobs 6                                 # two GPUs, 120 runs
    python examples/plan_matrix.py --device cpu --batches 6,8 --workloads 3 --max-tokens 16

A run has finished if every request has; a divergence is what the audit ends a run with. Runs of the
same process share an engine, one for each schedule; those of new processes begin from nothing, with
`--jobs` at a time. The cost of rank 0's message is taken on rank 0, from the runs of the same
process, when nothing else runs: its seconds over the seconds of rounds (prefills and captures left
out), and of those the exposed ones: of messages at whose end the device had nothing left to do. On
a CPU that is every one: there the host is the device.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEMO_PROMPTS = Path(__file__).parent / "demo" / "heldout.jsonl"
SCHEDULES = {"on": "overlapped", "off": "one by one"}


@dataclass(frozen=True)
class Workload:
    """What is asked of a batch."""

    name: str
    verify: str = "lagged"
    temperature: float = 0.0
    top_p: float = 1.0
    sampled_every: int = 1
    """One row of so many is sampled."""

    uneven: bool = False
    """Rows end one after another."""

    refills: float = 1.0
    """Requests in all, by batch."""

    waves: int = 1
    """In how many parts they come."""

    one_prompt: bool = False


WORKLOADS = (
    Workload("greedy"),
    Workload("sampled", temperature=0.8, top_p=0.95),
    Workload("sync", verify="sync"),
    Workload("uneven", uneven=True),
    Workload("refilled", uneven=True, refills=1.5),
    Workload("waves", waves=4),
    Workload("hot", temperature=1.5),
    Workload("mixed", temperature=1.0, sampled_every=3, uneven=True),
    Workload("one prompt, all", verify="all", one_prompt=True, temperature=0.7),
    Workload("sync, waves", verify="sync", temperature=0.8, sampled_every=2, waves=3, uneven=True),
)


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    batch: int
    workload: int
    schedule: str
    fresh: bool
    """In a process of its own?"""

    @property
    def name(self) -> str:
        process = "new process" if self.fresh else "same process"
        workload = WORKLOADS[self.workload].name
        return f"{self.batch}, {workload}, {SCHEDULES[self.schedule]}, {process}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS, help="JSONL with question")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", default="64,96,128")
    parser.add_argument("--workloads", type=int, default=len(WORKLOADS), help="the first N")
    parser.add_argument("--schedules", default="on,off", help="of on, off")
    parser.add_argument("--processes", default="same,new", help="of same, new")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=1, help="new processes at a time")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds without a run's end")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--cost-table", type=Path, help=argparse.SUPPRESS)  # between processes
    parser.add_argument("--play", help=argparse.SUPPRESS)  # cells, of a process that runs some
    return parser.parse_args()


# ---- one process's runs ------------------------------------------------------------------------


def play(given: argparse.Namespace) -> None:
    """Run cells on one engine, and write a line for each; stops at the first that fails."""
    from engine import DSparkError
    from engine.audit import DivergenceError

    cells = [Cell(**fields) for fields in json.loads(given.play)]
    engine = None
    for cell in cells:
        try:
            engine = engine or make_engine(given, cell)
            done = run_cell(engine, given, cell)
        except DSparkError as error:
            done = {"error": str(error), "diverged": isinstance(error, DivergenceError)}
        print(json.dumps(done), flush=True)
        if "error" in done:
            sys.exit(1)


def make_engine(given: argparse.Namespace, cell: Cell) -> Any:
    import torch

    from engine import Engine, EngineConfig

    on_cuda = given.device != "cpu" and torch.cuda.is_available()
    known = given.cost_table if given.cost_table.exists() else None
    most = max(map(int, given.batches.split(",")))
    engine = Engine(
        EngineConfig(
            model=given.model,
            draft=given.draft,
            device=given.device,
            dtype=given.dtype,
            threads=given.threads or (None if on_cuda else 1),
            tensor_parallel_size=given.tp,
            max_num_seqs=most,
            max_model_len=512,
            # several processes share a card
            kv_cache_memory_bytes=2 << 30 if on_cuda else None,
            # both loops, and no time spent on measuring which is faster
            sharded_loop="off" if cell.fresh and cell.workload % 2 else "on",
            cost_table=known,
            overlap=cell.schedule,
            audit=True,
        )
    )
    if known is None:
        engine.prepare()
        given.cost_table.write_text(json.dumps(engine.decisions.table.to_json()))
    return engine


def run_cell(engine: Any, given: argparse.Namespace, cell: Cell) -> dict[str, Any]:
    from engine import DSparkError, RequestFailure

    work, records = WORKLOADS[cell.workload], []
    requests = make_requests(engine, given, cell)
    before = asdict(engine.stats.schedule)
    engine.follow(records.append)
    source = in_waves(requests, cell.batch, work.waves)
    done, failed = {}, []
    for c in engine.run(source, verify=work.verify, max_num_seqs=cell.batch):
        if isinstance(c, RequestFailure):
            failed.append(f"row {c.request.request_id}: {c.message}")
        else:
            done[c.request.request_id] = c.token_ids
    engine.follow(None)
    if failed:
        raise DSparkError(f"{len(failed)} rows failed; {failed[0]}")
    after = asdict(engine.stats.schedule)
    counted = ("plans_told", "plan_seconds", "plan_exposed_seconds", "audits", "audit_seconds")
    outputs = sorted(done.items())
    return {
        "finished": len(done) == len(requests) and all(done.values()),
        "rounds": len(records),
        "most_at_once": max(r.requests for r in records),
        "paths": {p: n - before["rounds"][p] for p, n in after["rounds"].items()},
        "budgets": len({r.budget for r in records}),
        "keys": len({(r.path, r.slots, r.tokens) for r in records}),
        "round_seconds": covered([(r.begin, r.end) for r in records]),
        "outputs": hashlib.blake2b(repr(outputs).encode(), digest_size=8).hexdigest(),
        **{name: after[name] - before[name] for name in counted},
    }


def make_requests(engine: Any, given: argparse.Namespace, cell: Cell) -> list[Any]:
    from engine import Request, SamplingParams

    work = WORKLOADS[cell.workload]
    rows = [json.loads(line) for line in given.prompts.read_text("utf-8").splitlines()]
    many = []
    for i in range(round(cell.batch * work.refills)):
        row = rows[0 if work.one_prompt else i % len(rows)]
        messages = row.get("messages") or [{"role": "user", "content": row["question"]}]
        sampled = work.temperature if i % work.sampled_every == 0 else 0.0
        most = given.max_tokens
        params = SamplingParams(
            max_tokens=1 + i * 7 % most if work.uneven else most,
            temperature=sampled,
            top_p=work.top_p,
            seed=i,
        )
        prompt = tuple(engine.tokenizer.encode_chat(messages))
        many.append(Request(request_id=f"{i:04}", prompt_token_ids=prompt, params=params))
    return many


def in_waves(requests: list[Any], batch: int, waves: int) -> Iterator[Any]:
    """Requests, with turns between their parts in which there are none."""
    part = -(-batch // waves)
    for i, request in enumerate(requests):
        if i and waves > 1 and i % part == 0:
            yield from [None] * 2
        yield request


# ---- all of them -------------------------------------------------------------------------------


def run_cells(given: argparse.Namespace, cells: list[Cell]) -> list[dict[str, Any]]:
    """Results of cells that share an engine, as far as one lasts."""
    results: list[dict[str, Any]] = []
    while len(results) < len(cells):
        rest = cells[len(results) :]
        lines, said = in_process(given, rest)
        for cell, line in zip(rest, lines, strict=False):
            results.append({**asdict(cell), **json.loads(line)})
            tell(cell, results[-1])
        if len(lines) < len(rest) and not (lines and "error" in results[-1]):
            cell = rest[len(lines)]  # it ended, or was ended, in the middle of this one
            results.append({**asdict(cell), "error": said or "no answer", "diverged": False})
            tell(cell, results[-1])
    return results


def in_process(given: argparse.Namespace, cells: list[Cell]) -> tuple[list[str], str]:
    """Lines of a process that runs cells, and the last thing it said; ended if it gets stuck."""
    command = [sys.executable, __file__, "--play", json.dumps([asdict(c) for c in cells])]
    for name in ("model", "draft", "prompts", "device", "dtype", "threads", "batches"):
        if getattr(given, name) is not None:
            command += [f"--{name}", str(getattr(given, name))]
    command += ["-tp", str(given.tp), "--max-tokens", str(given.max_tokens)]
    command += ["--cost-table", str(given.cost_table)]
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        alarm = threading.Timer(given.timeout, process.kill)
        alarm.start()
        for line in process.stdout:
            lines.append(line)
            alarm.cancel()
            alarm = threading.Timer(given.timeout, process.kill)
            alarm.start()
        process.wait()
        alarm.cancel()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    return lines, said[-1] if said else ""


def tell(cell: Cell, done: dict[str, Any]) -> None:
    what = done.get("error") or f"{done['rounds']} rounds, {done['audits']} audits"
    print(f"{cell.name}: {what}", file=sys.stderr, flush=True)


HEADER = (
    "| schedule | process | runs | finished | divergences | rounds | budgets | graph keys | "
    "message us | of a round | exposed | audit us |\n" + "|---" * 12 + "|"
)


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans runs; they are ordered by their ends."""
    total, until = 0.0, float("-inf")
    for begin, end in spans:
        total += end - max(begin, until)
        until = end
    return total


def show(schedule: str, fresh: bool, results: list[dict[str, Any]], alone: bool) -> str:
    """A row of the table; costs are told of runs that had the machine for themselves."""
    good = [r for r in results if "error" not in r]
    total = {
        n: sum(r[n] for r in good)
        for n in (
            *("rounds", "plans_told", "plan_seconds", "plan_exposed_seconds", "audits"),
            *("audit_seconds", "round_seconds"),
        )
    }
    costs = ["", "", "", ""]
    if alone and total["rounds"]:
        costs = [
            f"{1e6 * total['plan_seconds'] / total['plans_told']:.0f}",
            f"{100 * total['plan_seconds'] / total['round_seconds']:.3f} %",
            f"{100 * total['plan_exposed_seconds'] / total['round_seconds']:.3f} %",
            f"{1e6 * total['audit_seconds'] / total['audits']:.0f}",
        ]
    cells = (
        SCHEDULES[schedule],
        "new" if fresh else "same",
        str(len(results)),
        str(sum(r["finished"] for r in good)),
        str(sum(r.get("diverged", False) for r in results)),
        str(total["rounds"]),
        *(f"{max((r[n] for r in good), default=0)}" for n in ("budgets", "keys")),
        *costs,
    )
    return "| " + " | ".join(cells) + " |"


def equal_outputs(results: list[dict[str, Any]]) -> str:
    """Greedy outputs of a batch must not depend on schedule, process or who drafts."""
    seen: dict[tuple[int, int], set[str]] = {}
    for done in results:
        if "outputs" in done and WORKLOADS[done["workload"]].temperature == 0:
            seen.setdefault((done["batch"], done["workload"]), set()).add(done["outputs"])
    same = sum(len(found) == 1 for found in seen.values())
    return f"greedy outputs equal in all their runs: {same} of {len(seen)} batches"


def found(given: argparse.Namespace) -> Iterator[tuple[str, bool, list[dict[str, Any]]]]:
    """Runs of one schedule, in one process or in new ones, as they are done."""
    sizes = [(int(b), w) for b in given.batches.split(",") for w in range(given.workloads)]
    schedules = [s for s in SCHEDULES if s in given.schedules.split(",")]
    if "same" in given.processes:
        for schedule in schedules:
            yield schedule, False, run_cells(given, [Cell(b, w, schedule, False) for b, w in sizes])
    if "new" in given.processes:
        fresh = [Cell(b, w, schedule, True) for schedule in schedules for b, w in sizes]
        with ThreadPoolExecutor(given.jobs) as pool:
            done = pool.map(lambda cell: run_cells(given, [cell]), fresh)
            for schedule in schedules:
                yield schedule, True, [next(done)[0] for _ in sizes]


def keep(given: argparse.Namespace, runs: list[dict[str, Any]]) -> None:
    """Write what there is so far."""
    if given.output_json:
        settings = {k: str(v) for k, v in vars(given).items()}
        given.output_json.write_text(json.dumps({"settings": settings, "runs": runs}) + "\n")


def main() -> None:
    given = parse()
    if given.play is not None:
        play(given)
        return
    begin = time.monotonic()
    every: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        given.cost_table = Path(folder) / "costs.json"
        for schedule, fresh, results in found(given):
            # each is told at once: the next one may take longer than whoever waits has
            print(show(schedule, fresh, results, alone=not fresh or given.jobs == 1), flush=True)
            every += results
            keep(given, every)
    finished = sum(done.get("finished", False) for done in every)
    diverged = sum(done.get("diverged", False) for done in every)
    print(
        f"\n{finished} of {len(every)} finished, {diverged} divergences, {given.tp} ranks, "
        f"{time.monotonic() - begin:.0f} s; {equal_outputs(every)}"
    )
    sys.exit(0 if finished == len(every) else 1)


if __name__ == "__main__":
    main()
