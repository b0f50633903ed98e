"""Rounds with the Markov loop at the requests' owners and on every rank, two engines in turn: ABBA.

    python examples/sharded_loop.py --model shape:qwen3-8b --synthetic-acceptance 3.5
    python examples/sharded_loop.py --model demo --device cpu --requests 1,4 --rounds 4

Both engines are there all the time, each with all ranks; they need memory for two.
"""

import argparse
from statistics import median

from engine import Engine, EngineConfig
from engine.measure import RoundTimes, measure_round

LOOPS = ("on", "off")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shape:qwen3-8b")
    parser.add_argument("--draft", help="default: as --model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-tp", type=int, default=2)
    parser.add_argument("--requests", default="1,8,16,32,64,128,256", help="batch sizes")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--synthetic-acceptance", type=float)
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=20 << 30)
    return parser.parse_args()


def make(given: argparse.Namespace, loop: str, most: int) -> Engine:
    """An engine of all ranks."""
    return Engine(
        EngineConfig(
            model=given.model,
            draft=given.draft or given.model,
            device=given.device,
            tensor_parallel_size=given.tp,
            sharded_loop=loop,
            max_num_seqs=most,
            max_model_len=128 + 8 * (given.rounds + 40),
            kv_cache_memory_bytes=given.kv_cache_memory_bytes,
            enable_prefix_caching=False,
            synthetic_acceptance=given.synthetic_acceptance,
            verify="all",
        )
    )


def main() -> None:
    """Print the table."""
    given = parse()
    sizes = sorted(int(part) for part in given.requests.split(","))
    engines = {loop: make(given, loop, sizes[-1]) for loop in LOOPS}
    print("| requests | replicated ms | sharded ms | sharded is | replicated tok/s | sharded |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        times: dict[str, list[RoundTimes]] = {loop: [] for loop in LOOPS}
        for loop in (*LOOPS, *LOOPS[::-1]):
            times[loop].append(
                measure_round(
                    engines[loop],
                    size,
                    prompt_tokens=64,
                    rounds=given.rounds,
                    warmup=4,
                    temperature=given.temperature,
                )
            )
        on, off = (median(t.wall for t in times[loop]) for loop in LOOPS)
        speeds = (median(t.tokens_per_second for t in times[loop]) for loop in LOOPS[::-1])
        cells = [f"{off:.3f}", f"{on:.3f}", f"{100 * (on / off - 1):+.2f} %"]
        print(" | ".join([f"| {size}", *cells, *(f"{s:.0f}" for s in speeds)]) + " |", flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
