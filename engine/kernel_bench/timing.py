"""How long calls take, and how fast the device copies and multiplies."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from engine.kernels.capture import capture
from engine.models.layers import Placement

Call = Callable[[], object]
_REPEATS, _CPU_SECONDS = 12, 0.2


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the device can do, measured just now."""

    copy: float
    """Bytes a second, read and written ones together."""

    matmul: float
    """FLOP a second of a large square product; on a CPU the best of a few sizes."""

    def seconds(self, nbytes: float, flops: float) -> float:
        """The least time that moves so much and computes so much."""
        return max(nbytes / self.copy, flops / self.matmul)


@torch.inference_mode()
def measure_ceiling(at: Placement) -> Ceiling:
    """Copy and multiply; a gigabyte and 8192 x 8192 matrices on a GPU, less on a CPU."""
    on_cpu = at.device.type == "cpu"
    count, sides = (1 << 24, (256, 512, 1024)) if on_cpu else (1 << 28, (8192,))
    source = torch.ones(count, dtype=torch.float32, device=at.device)
    target = torch.empty_like(source)
    copy = seconds_a_call([lambda: target.copy_(source)], at.device)
    matmul = max(_matmul_rate(side, at) for side in sides)
    return Ceiling(copy=2 * source.nbytes / copy, matmul=matmul)


def _matmul_rate(side: int, at: Placement) -> float:
    a = torch.empty((side, side), dtype=at.dtype, device=at.device).normal_()
    return 2.0 * side**3 / seconds_a_call([lambda: a @ a], at.device)


@torch.inference_mode()
def seconds_a_call(calls: list[Call], device: torch.device) -> float:
    """Median seconds of one of the calls, all of them made one after the other.

    Args:
        calls: On a GPU they are captured in one graph, so that the host's time does not count.
        device: Where they run.
    """
    if device.type == "cpu":
        times: list[float] = []
        while len(times) < 3 or sum(times) < _CPU_SECONDS:
            begin = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - begin)
        return median(times) / len(calls)
    graph, _ = capture(lambda: _make(calls), warm_up=lambda: _make(calls[:2]))
    graph.replay()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return median(times) / len(calls)


def _make(calls: list[Call]) -> None:
    for call in calls:
        call()
