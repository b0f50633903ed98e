"""How long a GPU waits while requests come and go: kernels traced in the middle of a run.

    python examples/idle_share.py --model shape:qwen3-8b --draft shape:qwen3-8b \\
        --synthetic-acceptance 3.5 --requests 1,8,32

Four requests for each that is decoded at once, made-up prompts of 128 tokens, 96 to 255 new ones:
they end one by one. Idle is the time in which no kernel and no copy runs. Gaps of over 20 us are
waits for the host; shorter ones lie between the kernels of a graph. Tracing slows the host down.
"""

import argparse
import sys
from typing import Any

import torch

from engine import Engine, EngineConfig, Request, SamplingParams

WAIT_US = 20.0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shape:qwen3-8b")
    parser.add_argument("--draft", help="default: as --model")
    parser.add_argument("--requests", default="1,8,32", help="batch sizes")
    parser.add_argument("--modes", default="all,lagged,plain")
    parser.add_argument("--synthetic-acceptance", type=float)
    return parser.parse_args()


def make_requests(count: int) -> list[Request]:
    """They end one after the other."""
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple((i * 7919 + j * 31) % 900 + 8 for j in range(128)),
            params=SamplingParams(max_tokens=96 + i * 37 % 160, ignore_eos=True),
        )
        for i in range(count)
    ]


def idle_of(intervals: list[tuple[float, float]]) -> tuple[float, list[float]]:
    """Of (begin, end) of what ran: all of the time between, and the gaps, in their unit."""
    gaps, (first, at) = [], min(intervals)
    for begin, end in sorted(intervals):
        if begin > at:
            gaps.append(begin - at)
        at = max(at, end)
    return at - first, gaps


def traced(engine: Engine, width: int, mode: str) -> list[tuple[float, float]]:
    """(begin, end) of what ran on the device, us, between the first ends and the last starts."""
    verify: Any = None if mode == "plain" else mode
    trace: Any = None
    begin, end = width + 1, max(3 * width, 3)
    run = engine.run(
        make_requests(4 * width), speculate=mode != "plain", verify=verify, max_num_seqs=width
    )
    for ended, _ in enumerate(run, start=1):
        if ended == begin:
            torch.cuda.synchronize()
            trace = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            trace.__enter__()
        if ended == end:
            torch.cuda.synchronize()
            trace.__exit__(None, None, None)
            break
    run.close()
    on_device = torch.autograd.DeviceType.CUDA
    events = [e for e in trace.events() if e.device_type == on_device]
    return [(e.time_range.start, e.time_range.end) for e in events]


def main() -> None:
    """Print the table."""
    given = parse()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device: on a CPU the host is the device")
    sizes = [int(part) for part in given.requests.split(",")]
    engine = Engine(
        EngineConfig(
            model=given.model,
            draft=given.draft or given.model,
            max_num_seqs=max(sizes),
            max_model_len=512,
            enable_prefix_caching=False,
            synthetic_acceptance=given.synthetic_acceptance,
        )
    )
    print("| requests | mode | traced ms | idle | waits for the host |")
    print("|---|---|---|---|---|")
    for width in sizes:
        for mode in given.modes.split(","):
            for _ in range(2):  # captures, in the first
                span, gaps = idle_of(traced(engine, width, mode))
            idle, waits = (
                100 * sum(gap for gap in gaps if gap > least) / span for least in (0.0, WAIT_US)
            )
            cells = f"{span / 1e3:.0f} | {idle:.2f} % | {waits:.2f} %"
            print(f"| {width} | {mode} | {cells} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
