"""How long an exchange takes when all ranks make it together."""

import time
from collections.abc import Callable
from statistics import median

import torch

from engine.kernels.capture import capture


def milliseconds(
    body: Callable[[], object], device: torch.device, *, calls: int = 10, repeats: int = 5
) -> float:
    """Median time of one call; every rank has to measure the same things in the same order.

    On a CUDA device the calls are replayed from one graph, as rounds are.

    Args:
        body: What to time; allocates nothing that the caller keeps.
        device: Where it runs.
        calls: Calls in a row between two looks at the clock.
        repeats: Looks; the median counts.
    """
    for _ in range(2):
        body()  # compile, connect, fill caches
    if device.type != "cuda":
        return 1e3 * median(_wall(body, calls) for _ in range(repeats))

    def several() -> None:
        for _ in range(calls):
            body()

    graph, _ = capture(several, warm_up=body)
    graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / calls)
    return median(times)


def _wall(body: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        body()
    return (time.perf_counter() - begin) / calls
