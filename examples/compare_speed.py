"""Decode the same prompts three ways in one run: transformers, dspark plain, dspark drafted.

    python examples/compare_speed.py --model MODEL --draft DRAFT --prompts prompts.jsonl
    python examples/compare_speed.py ... --device cuda --batches 1,8,64,256 --ignore-eos

Greedy. At every batch size all ways get the same prompts, as many at once; transformers pads them
on the left and decodes a batch until its last row ends, dspark gives a freed row to the next
prompt. With --ignore-eos every output has --max-tokens tokens, so that all ways do the same work.
Ways are interleaved and repeated, so that a busy machine slows all of them; what is printed is the
median. Prompts in, texts out, prefill included; loading and a warm-up pass are not. Outputs are
compared token for token; a difference is an error unless --allow-different (near ties of low
precision).
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine import Completion, Engine, EngineConfig, Request, SamplingParams
from engine.text import Tokenizer

TRANSFORMERS, PLAIN, DRAFTED = "transformers", "dspark plain", "dspark drafted"
Ids = list[int]
Way = Callable[[Sequence[Ids], int], list[Ids]]
"""(prompts, how many at once) -> outputs, end token included, in the prompts' order."""


def transformers_way(args: argparse.Namespace, dtype: torch.dtype, tokenizer: Tokenizer) -> Way:
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model.to(args.device).eval()
    settings = model.generation_config
    ends = settings.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) - {None}
    pad = settings.pad_token_id if settings.pad_token_id is not None else min(ends, default=0)
    settings.update(pad_token_id=pad, do_sample=False, temperature=None, top_p=None, top_k=None)
    if args.ignore_eos:
        settings.eos_token_id, ends = None, set()

    def generate(prompts: Sequence[Ids]) -> list[Ids]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=args.device)
        real = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=real.to(args.device), max_new_tokens=args.max_tokens
            )
        return [cut(row, ends) for row in out[:, longest:].tolist()]

    def run(prompts: Sequence[Ids], at_once: int) -> list[Ids]:
        outputs = []
        for start in range(0, len(prompts), at_once):
            outputs += generate(prompts[start : start + at_once])
        for ids in outputs:
            tokenizer.decode(ids)  # as dspark does
        return outputs

    return run


def cut(ids: Ids, ends: set[int]) -> Ids:
    at = next((k for k, token in enumerate(ids) if token in ends), len(ids))
    return ids[: at + 1]


def dspark_way(args: argparse.Namespace, engine: Engine, speculate: bool) -> Way:
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)

    def run(prompts: Sequence[Ids], at_once: int) -> list[Ids]:
        requests = [
            Request(request_id=str(n), prompt_token_ids=tuple(ids), params=params)
            for n, ids in enumerate(prompts)
        ]
        done = {}
        for out in engine.run(requests, speculate=speculate, max_num_seqs=at_once):
            if not isinstance(out, Completion):
                sys.exit(f"prompt {out.request.request_id}: {out.message}")
            done[int(out.request.request_id)] = list(out.token_ids)
        return [done[n] for n in range(len(prompts))]

    return run


@dataclass(frozen=True)
class Point:
    """One batch size; `seconds` of each repeat."""

    at_once: int
    prompts: int
    tokens: dict[str, int]
    seconds: dict[str, list[float]]
    equal: dict[str, int]
    """Outputs equal to those of dspark plain."""

    first_difference: dict[str, int | None]
    """Median output token of the first difference from dspark plain."""

    acceptance_length: float

    def speed(self, way: str) -> float:
        return self.tokens[way] / statistics.median(self.seconds[way])

    def row(self) -> str:
        drafted, plain, theirs = (self.speed(w) for w in (DRAFTED, PLAIN, TRANSFORMERS))
        spread = max(max(s) / min(s) - 1 for s in self.seconds.values())
        cells = (
            f"{self.at_once}",
            f"{theirs:,.1f}",
            f"{plain:,.1f}",
            f"{drafted:,.1f}",
            f"{drafted / plain:.2f} x",
            f"{plain / theirs:.2f} x",
            f"{drafted / theirs:.2f} x",
            f"{self.acceptance_length:.3f}",
            f"{self.equal[DRAFTED]}, {self.equal[TRANSFORMERS]} of {self.prompts}",
            f"{100 * spread:.0f} %",
        )
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| at once | transformers tokens/s | plain | drafted | drafted / plain | plain / transformers "
    "| drafted / transformers | acceptance length | equal to plain: drafted, transformers "
    "| spread |\n" + "|---" * 10 + "|"
)


def measure(
    ways: dict[str, Way], engine: Engine, prompts: list[Ids], at_once: int, repeats: int
) -> Point:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs: dict[str, list[Ids]] = {}
    lengths = []
    # warm-up: kernels and caches; graphs are captured at every size that a pass shrinks to
    for way in ways.values():
        way(prompts if torch.cuda.is_available() else prompts[:at_once], at_once)
    for repeat in range(repeats):
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            before = (engine.stats.committed, engine.stats.rounds)
            begin = time.perf_counter()
            outputs[name] = ways[name](prompts, at_once)
            seconds[name].append(time.perf_counter() - begin)
            if name == DRAFTED:
                rounds = engine.stats.rounds - before[1]
                lengths.append((engine.stats.committed - before[0]) / max(rounds, 1))
    firsts = {
        name: [
            k
            for ours, theirs in zip(outputs[PLAIN], found, strict=True)
            if (k := first_difference(ours, theirs)) is not None
        ]
        for name, found in outputs.items()
    }
    return Point(
        at_once=at_once,
        prompts=len(prompts),
        tokens={name: sum(map(len, found)) for name, found in outputs.items()},
        seconds=seconds,
        equal={name: len(prompts) - len(found) for name, found in firsts.items()},
        first_difference={n: statistics.median_low(f) if f else None for n, f in firsts.items()},
        acceptance_length=statistics.median(lengths),
    )


def first_difference(a: Ids, b: Ids) -> int | None:
    if a == b:
        return None
    shared = zip(a, b, strict=False)
    return next((k for k, (x, y) in enumerate(shared) if x != y), min(len(a), len(b)))


def load_chats(path: str, count: int) -> list[list[dict[str, Any]]]:
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, count)]
    if len(rows) < count:
        sys.exit(f"{path} holds {len(rows)} rows, the largest batch needs {count}: give more")
    asked = [row.get("question") or row.get("prompt") for row in rows]
    return [
        row.get("messages") or [{"role": "user", "content": text}]
        for row, text in zip(rows, asked, strict=True)
    ]


def describe(args: argparse.Namespace, engine: Engine, prompts: list[Ids]) -> list[str]:
    cuda = args.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    lengths = [len(p) for p in prompts]
    ending = "end token ignored" if args.ignore_eos else "natural end"
    return [
        f"{name}{'' if cuda else f', {args.threads} threads'}, {engine.config.dtype}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        f"{args.model} with {args.draft}: prompts of {min(lengths)} to {max(lengths)} tokens, at "
        f"most {args.max_tokens} new ones ({ending}), greedy, median of {args.repeats} passes",
        "command: python " + shlex.join(sys.argv),
    ]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batches", default="1", help="prompts at once, as 1,8,64")
    parser.add_argument("--limit", type=int, default=8, help="prompts a pass, at least a batch")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", help="auto: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--allow-different", action="store_true")
    parser.add_argument("--json", help="write every number here")
    args = parser.parse_args()
    args.sizes = sorted({int(part) for part in args.batches.split(",")})
    if args.sizes[0] < 1 or args.limit < 1 or args.repeats < 1:
        parser.error("--batches, --limit and --repeats must be 1 or more")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    return args


def main() -> None:
    args = read_arguments()
    # a whole number of full batches
    wanted = {size: -(-max(size, args.limit) // size) * size for size in args.sizes}
    chats = load_chats(args.prompts, max(wanted.values()))
    torch.set_num_threads(args.threads)
    engine = Engine(
        EngineConfig(
            model=args.model,
            draft=args.draft,
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=args.sizes[-1],
            threads=args.threads if args.device == "cpu" else None,
            enable_prefix_caching=False,
        )
    )
    ways = {
        TRANSFORMERS: transformers_way(args, getattr(torch, args.dtype), engine.tokenizer),
        PLAIN: dspark_way(args, engine, speculate=False),
        DRAFTED: dspark_way(args, engine, speculate=True),
    }
    prompts = [engine.tokenizer.encode_chat(messages) for messages in chats]
    print(*describe(args, engine, prompts), HEADER, sep="\n", flush=True)
    points = []
    for size, count in wanted.items():
        points.append(measure(ways, engine, prompts[:count], size, args.repeats))
        print(points[-1].row(), flush=True)
    for point in points:
        for name, at in point.first_difference.items():
            if at is not None:
                print(f"{point.at_once} at once: {name} first differs at token {at} (median)")
    if args.json:
        whole = {"about": describe(args, engine, prompts), "points": [asdict(p) for p in points]}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    unequal = sum(point.prompts - min(point.equal.values()) for point in points)
    if unequal and not args.allow_different:
        sys.exit(f"{unequal} prompts have unequal outputs (--allow-different: near ties)")


if __name__ == "__main__":
    main()
