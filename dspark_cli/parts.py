"""What each of several engines on this host gets of it: devices, cores, memory."""

import os
from dataclasses import dataclass, field, replace
from itertools import pairwise

from engine.config import EngineConfig
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's part of the host."""

    config: EngineConfig
    env: dict[str, str] = field(default_factory=dict)
    """Environment that shows its devices alone."""

    cores: list[int] = field(default_factory=list)
    """CPU cores to stay on; empty: any."""


def share_out(config: EngineConfig, count: int) -> list[Share]:
    """Deal the host to engines of equal settings.

    On CUDA each gets -tp devices of those that are visible; on a CPU its part of the cores, one for
    each rank at least, and of the memory that one engine would take for KV.

    Args:
        config: Their settings.
        count: How many.

    Raises:
        ConfigError: There are too few devices, or cores.
    """
    each = config.tensor_parallel_size or 1
    devices = [] if config.device == "cpu" else _devices()
    if not devices and config.device != "cuda":
        config = replace(config, gpu_memory_utilization=config.gpu_memory_utilization / count)
        return [Share(config, cores=cores) for cores in _cores(count, each)]
    if count * each > len(devices):
        raise ConfigError(
            f"--data-parallel-size {count} with -tp {each} needs {count * each} CUDA devices, "
            f"there are {len(devices)}",
            "lower one of them, or show more devices with CUDA_VISIBLE_DEVICES",
        )
    dealt = [devices[at * each : (at + 1) * each] for at in range(count)]
    return [Share(config, env={"CUDA_VISIBLE_DEVICES": ",".join(mine)}) for mine in dealt]


def _devices() -> list[str]:
    """Visible CUDA devices, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) for n in range(count)] if visible is None else visible.split(",")
    return [name.strip() for name in names[:count]]


def _cores(count: int, each: int) -> list[list[int]]:
    pinned = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = sorted(os.sched_getaffinity(0)) if pinned else list(range(os.cpu_count() or 1))
    if count * each > len(cores):
        ranks = f" with -tp {each}" if each > 1 else ""
        raise ConfigError(
            f"--data-parallel-size {count}: {count} engines{ranks} need {count * each} cores, this "
            f"host has {len(cores)}",
            f"lower --data-parallel-size{' or -tp' if each > 1 else ''}",
        )
    if not pinned:
        return [[] for _ in range(count)]
    ends = [len(cores) * at // count for at in range(count + 1)]
    return [cores[a:b] for a, b in pairwise(ends)]
