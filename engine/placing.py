"""Where a process computes: device, dtype, threads."""

import os
import time
from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.dist.collectives import Collectives, Solo
from engine.errors import ConfigError
from engine.kernels.linear import Linear
from engine.models.interface import AnyTarget, Target
from engine.models.layers import Placement

_THREAD_TRIALS = 24

_CLEARLY = 0.85
"""Share of one thread's time that more have to get by with: a pick on a busy machine is a guess."""


def placement(
    config: EngineConfig, target: AnyTarget, ranks: Collectives | None = None
) -> Placement:
    """Device and dtype to compute in, and with whom."""
    device = device_of(config.device)
    name: str = config.dtype
    if name == "auto":
        # CPUs without native bfloat16 would be slower in it, and less exact
        name = "float32" if device.type == "cpu" else _known_dtype(target.dtype)
    return Placement(getattr(torch, name), device, ranks or Solo())


def device_of(name: str) -> torch.device:
    """The device that auto, cpu or cuda means here."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "--device cuda: torch sees no CUDA device",
            hint="use --device cpu, or install CUDA torch",
        )
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _known_dtype(name: str) -> str:
    return name if name in ("float32", "bfloat16", "float16") else "bfloat16"


def overlaps(config: EngineConfig, device: torch.device) -> bool:
    """Is a round prepared while the one before it runs?"""
    return device.type == "cuda" if config.overlap == "auto" else config.overlap == "on"


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@torch.inference_mode()
def pick_threads(target: Target, most: int) -> int:
    """As `faster_threads`, of a network's layers."""
    return faster_threads(target.layers[0].products, target.embedding.dtype, most)


def faster_threads(products: Sequence[Linear], dtype: torch.dtype, most: int) -> int:
    """`most` threads if they run a layer's products clearly faster here and now, else 1.

    Threads wait for each other after every product. Where other programs keep the cores busy, or
    the products are small, one thread is faster than two, at times by several fold.
    """
    rows = {n: torch.randn(8, n, dtype=dtype) for n in {m.in_features for m in products}}

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        begin = 0.0
        for trial in range(_THREAD_TRIALS):
            if trial == 2:  # the first ones start threads and fill caches
                begin = time.perf_counter()
            for matrix in products:
                matrix(rows[matrix.in_features])
        # the sum, not the median: a stall now and then is what makes many threads slow
        return time.perf_counter() - begin

    return most if most > 1 and seconds(most) < _CLEARLY * seconds(1) else 1
