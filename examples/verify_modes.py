"""Plain decoding, --verify all and lagged on the same requests, interleaved (A B C C B A).

    python examples/verify_modes.py --model demo --draft demo --requests 32
    python examples/verify_modes.py --model SMOLLM2 --draft DRAFTER --prompts GSM8K_TEST.jsonl \\
        --requests 1,8,32,64,128,256
    python examples/verify_modes.py --model shape:qwen3-8b --draft shape:qwen3-8b \\
        --synthetic-acceptance 3.5 --requests 1,8,64,256

Speeds are output tokens a second of whole passes, prefill and tail included. On a CPU that others
use, too, `cpu` tells more: tokens per second of this process's own CPU time.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine import Completion, Engine, EngineConfig, Request, SamplingParams
from engine.garbage import settle
from engine.telemetry import ScheduleStats

DEMO_PROMPTS = Path(__file__).parent / "demo" / "heldout.jsonl"


@dataclass(frozen=True)
class Pass:
    """One mode over the requests of one batch size."""

    speed: float
    cpu_speed: float
    tokens: int
    outputs: dict[str, tuple[int, ...]]
    schedule: ScheduleStats
    seconds: dict[str, float]
    """By phase: the device's prefill, draft, verify; the host's wait, host, capture."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, help="JSONL with question, prompt or messages")
    parser.add_argument("--requests", default="1,8,32", help="batch sizes")
    parser.add_argument("--modes", default="plain,all,lagged")
    parser.add_argument("--per-batch", type=int, default=2, help="requests per slot with --prompts")
    parser.add_argument("--most", type=int, default=512, help="requests at most")
    parser.add_argument("--pairs", type=int, default=1, help="times A B C C B A")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of made-up prompts")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--cost-table", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-fill-tiers", action="store_true")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def make_requests(given: argparse.Namespace, engine: Engine, count: int) -> list[Request]:
    """The first `count` prompts, over and over if need be; or made-up ones of equal length."""
    made_up = given.model.startswith("shape:")
    params = SamplingParams(
        max_tokens=given.max_tokens, temperature=given.temperature, ignore_eos=made_up
    )
    if made_up:
        prompts = [
            [(i * 7919 + j * 31) % 900 + 8 for j in range(given.prompt_tokens)]
            for i in range(count)
        ]
    else:
        lines = (given.prompts or DEMO_PROMPTS).read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines[:count]]
        prompts = [encode(engine, row) for row in rows]
    return [
        Request(request_id=str(i), prompt_token_ids=tuple(prompts[i % len(prompts)]), params=params)
        for i in range(count)
    ]


def encode(engine: Engine, row: dict[str, Any]) -> list[int]:
    messages = row.get("messages") or [
        {"role": "user", "content": row.get("question") or row.get("prompt")}
    ]
    return engine.tokenizer.encode_chat(messages)


def run_pass(engine: Engine, requests: list[Request], mode: str, width: int) -> Pass:
    engine.stats.schedule = ScheduleStats()
    engine.decisions._stats = engine.stats.schedule
    before = dict(engine.stats.seconds)
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = {}
    verify: Any = None if mode == "plain" else mode
    for done in engine.run(requests, speculate=mode != "plain", verify=verify, max_num_seqs=width):
        assert isinstance(done, Completion), done
        outputs[done.request.request_id] = done.token_ids
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(map(len, outputs.values()))
    seconds = {name: spent - before.get(name, 0.0) for name, spent in engine.stats.seconds.items()}
    return Pass(tokens / wall, tokens / cpu, tokens, outputs, engine.stats.schedule, seconds)


def measure(engine: Engine, given: argparse.Namespace, width: int) -> dict[str, list[Pass]]:
    modes = given.modes.split(",")
    count = width if given.model.startswith("shape:") else given.per_batch * width
    requests = make_requests(given, engine, max(min(count, given.most), width))
    passes: dict[str, list[Pass]] = {mode: [] for mode in modes}
    for mode in modes * 2:  # warm-up: compilation, costs, and captures as they have paid
        run_pass(engine, requests, mode, width)
    for _ in range(given.pairs):
        for mode in (*modes, *modes[::-1]):
            passes[mode].append(run_pass(engine, requests, mode, width))
    return passes


def row_of(width: int, mode: str, passes: dict[str, list[Pass]]) -> dict[str, Any]:
    made, last = passes[mode], passes[mode][-1]
    speed = {m: median(p.speed for p in found) for m, found in passes.items()}
    cpu = {m: median(p.cpu_speed for p in found) for m, found in passes.items()}
    others = [m for m in passes if m != mode]
    first = next(iter(passes.values()))[0].outputs
    return {
        "requests": width,
        "mode": mode,
        "tokens_per_second": speed[mode],
        "least": min(p.speed for p in made),
        "most": max(p.speed for p in made),
        "over_best_other": speed[mode] / max(speed[m] for m in others) if others else None,
        "cpu_tokens_per_second": cpu[mode],
        "cpu_over_best_other": cpu[mode] / max(cpu[m] for m in others) if others else None,
        "equal_outputs": sum(last.outputs[i] == first[i] for i in first),
        "outputs": len(first),
        "mean_budget": last.schedule.mean_budget,
        "padding_share": last.schedule.padding_share,
        "schedule": asdict(last.schedule),
        "seconds": [{k: round(v, 4) for k, v in p.seconds.items() if v > 0} for p in made],
    }


def show(row: dict[str, Any]) -> str:
    done = row["schedule"]
    paths = "/".join(str(done["rounds"][p]) for p in ("plain", "full", "compact"))
    cells = (
        f"{row['requests']}",
        row["mode"],
        f"{row['tokens_per_second']:.0f}",
        f"{row['least']:.0f}-{row['most']:.0f}",
        f"{row['over_best_other']:.3f}",
        f"{row['cpu_tokens_per_second']:.0f}",
        f"{row['cpu_over_best_other']:.3f}",
        f"{row['mean_budget']:.2f}",
        paths,
        f"{100 * row['padding_share']:.0f} %",
        f"{done['predicted']:.0f}/{done['realised']}",
        f"{row['equal_outputs']}/{row['outputs']}",
        f"{done['captures']}",
    )
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| requests | mode | tokens/s | range | over best other | cpu tok/s | same | drafts verified | "
    "plain/full/compact rounds | padding | predicted/realised | equal outputs | graphs |\n"
    + "|---" * 13
    + "|"
)


def main() -> None:
    given = parse()
    # rising: rounds captured for a larger batch serve a smaller one, padded, and flatter `lagged`
    widths = sorted(int(part) for part in given.requests.split(","))
    begin = time.perf_counter()
    engine = Engine(
        EngineConfig(
            model=given.model,
            draft=given.draft,
            device=given.device,
            threads=given.threads,
            max_num_seqs=max(widths),
            max_model_len=1024 if given.model.startswith("shape:") else None,
            synthetic_acceptance=given.synthetic_acceptance,
            cost_table=given.cost_table,
            calibration=given.calibration,
            fill_tiers=not given.no_fill_tiers,
            enable_prefix_caching=False,
        )
    )
    loaded = time.perf_counter() - begin
    spent = engine.prepare()
    settle(engine.runner.rows.device)
    print(f"loaded in {loaded:.1f} s, measured costs in {spent or 0:.1f} s", file=sys.stderr)
    rows = []
    print(HEADER)
    for width in widths:
        passes = measure(engine, given, width)
        for mode in passes:
            rows.append(row_of(width, mode, passes))
            print(show(rows[-1]), flush=True)
    if given.output_json:
        table = engine.decisions.table
        whole = {
            "settings": {k: str(v) for k, v in vars(given).items()},
            "cost_table": None if table is None else table.to_json(),
            "rows": rows,
        }
        given.output_json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
