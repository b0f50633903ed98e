"""Decode the same prompts three ways in one run: transformers, dspark plain, dspark drafted.

    python examples/compare_speed.py --model MODEL --draft DRAFT --prompts prompts.jsonl

Greedy, one request at a time, the ways interleaved prompt by prompt so that a busy machine slows
all of them. Prints tokens per second of each and the ratios; refuses to compare unequal outputs
unless --allow-different (near ties of low precision).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from engine import Completion, Engine, EngineConfig, Request, SamplingParams
from engine.text import Tokenizer

Way = Callable[[list[int]], list[int]]


def transformers_way(args: argparse.Namespace) -> Way:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32 if args.device == "cpu" else "auto"
    ).to(args.device)
    model.eval()

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=args.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_tokens,
                do_sample=False,
            )
        return out[0, len(prompt) :].tolist()

    return run


def dspark_way(args: argparse.Namespace, draft: str | None) -> tuple[Way, Engine]:
    engine = Engine(
        EngineConfig(
            model=args.model,
            draft=draft,
            device=args.device,
            max_num_seqs=1,
            threads=args.threads,
            enable_prefix_caching=False,
        )
    )

    def run(prompt: list[int]) -> list[int]:
        request = Request(
            request_id="0",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=args.max_tokens),
        )
        (out,) = engine.run([request])
        assert isinstance(out, Completion), out
        return list(out.token_ids)

    return run, engine


def load_prompts(args: argparse.Namespace) -> list[list[int]]:
    tokenizer = Tokenizer.load(Path(args.model))
    prompts = []
    with open(args.prompts, encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = row.get("question") or row.get("prompt")
            messages = row.get("messages") or [{"role": "user", "content": text}]
            prompts.append(tokenizer.encode_chat(messages))
    return prompts[: args.limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--allow-different", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    drafted, engine = dspark_way(args, args.draft)
    plain, _ = dspark_way(args, None)
    ways = {"transformers": transformers_way(args), "dspark plain": plain, "dspark": drafted}
    prompts = load_prompts(args)
    for way in ways.values():
        way(prompts[0][:8])  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = different = 0
    for i, prompt in enumerate(prompts):
        outputs = {}
        order = list(ways) if i % 2 == 0 else list(ways)[::-1]
        for name in order:
            begin = time.perf_counter()
            outputs[name] = ways[name](prompt)
            seconds[name].append(time.perf_counter() - begin)
        tokens += len(outputs["dspark"])
        different += len({tuple(o) for o in outputs.values()}) > 1
    if different and not args.allow_different:
        sys.exit(f"{different} of {len(prompts)} prompts have unequal outputs")

    print(
        f"{platform.processor() or platform.machine()}, {args.threads} threads, "
        f"{args.device}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(f"{len(prompts)} prompts, {tokens} tokens each way, {different} unequal outputs")
    base = sum(seconds["dspark"])
    for name, values in seconds.items():
        total = sum(values)
        per_prompt = [v / d for v, d in zip(values, seconds["dspark"], strict=True)]
        print(
            f"{name:14s} {tokens / total:7.1f} tokens/s   dspark is {total / base:.2f} x "
            f"(median of prompts {statistics.median(per_prompt):.2f} x)"
        )
    print(f"acceptance length {engine.stats.acceptance_length:.3f}")


if __name__ == "__main__":
    main()
