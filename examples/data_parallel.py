"""One run of `dspark generate` in several ways, interleaved (A B C C B A): speeds, equal outputs?

    python examples/data_parallel.py prompts.jsonl --way= --way="-dp 2" -- --model demo --threads 1
    python examples/data_parallel.py prompts.jsonl --way= --way="--cluster local -dp 1" -- \\
        --model demo --threads 1
    python examples/data_parallel.py prompts.jsonl --way= --way="-dp 2" --way="-tp 2" -- \\
        --model MODEL --draft DRAFTER      # two GPUs: two engines, or one on both

What comes after `--` is given to every run. Speeds are output tokens a second of the loop, loading
left out (`whole` counts everything); the first way is what the others are compared with.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Pass:
    speed: float
    seconds: float
    whole: float
    output: str


def main() -> None:
    options, shared = split(sys.argv[1:])
    ways = options.way or ["", "-dp 2"]
    passes: dict[str, list[Pass]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.pairs):
            for way in (*ways, *reversed(ways)):
                passes[way].append(run(options.prompts, way, shared, Path(folder)))
                last = passes[way][-1]
                print(f"{name(way):40} {last.speed:10.1f} tokens/s", file=sys.stderr)
    base = median(each.speed for each in passes[ways[0]])
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"| {'way':38} | tokens/s | of the first | seconds | whole |")
    print("|---|---|---|---|---|")
    for way, many in passes.items():
        speed = median(each.speed for each in many)
        seconds, whole = (median(getattr(x, f) for x in many) for f in ("seconds", "whole"))
        cells = f"{name(way):38} | {speed:8.1f} | {speed / base:.3f} | {seconds:.1f} | {whole:.1f}"
        print(f"| {cells} |")
    outputs = {each.output for many in passes.values() for each in many}
    print("outputs are equal" if len(outputs) == 1 else "outputs differ (sampled, or near ties?)")


def split(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--way", action="append", help="options of one way; repeatable")
    parser.add_argument("--pairs", type=int, default=1, help="times there and back")
    return parser.parse_args(argv[:at]), argv[at + 1 :]


def run(prompts: Path, way: str, shared: list[str], folder: Path) -> Pass:
    output, metrics = folder / "out.jsonl", folder / "metrics.json"
    command = [sys.executable, "-m", "dspark_cli", "generate", str(prompts), "-o", str(output)]
    command += ["--overwrite", "--quiet", "--metrics-json", str(metrics), *shared]
    begin = time.perf_counter()
    done = subprocess.run([*command, *shlex.split(way)], check=False)
    whole = time.perf_counter() - begin
    if done.returncode not in (0, 3):
        sys.exit(done.returncode)
    speed = json.loads(metrics.read_text())["speed"]
    digest = hashlib.sha256()
    for line in output.read_text().splitlines():
        row = json.loads(line)
        digest.update(repr((row["id"], row.get("sample"), row["token_ids"])).encode())
    return Pass(speed["output_tokens_per_second"], speed["seconds"], whole, digest.hexdigest())


def name(way: str) -> str:
    return way or "one engine"


if __name__ == "__main__":
    main()
