"""What `dspark inspect` tells of a DeepSeek-V4 checkpoint: layers, what is kept, how many GPUs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.dist.collectives import Solo
from engine.models import families
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.interface import AnyDraft, AnyTarget
from engine.models.layers import Placement
from engine.models.loader import Outline
from engine.models.shard import Part

GPU_BYTES, USABLE = 141e9, 0.9
"""An H200's memory, and the share of it that weights and requests may take."""


class _Scales(Outline):
    """Headers that are weighed as they are taken."""

    nbytes = 0

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        part: Part | None = None,
    ) -> torch.Tensor:
        """As `Outline.take`."""
        x = super().take(name, shape, dtype=dtype, device=device, part=part)
        self.nbytes += x.nbytes
        return x

    def take_raw(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stored: Mapping[str, torch.dtype],
        device: torch.device | str,
        part: Part | None = None,
    ) -> torch.Tensor:
        """As `Outline.take_raw`."""
        x = super().take_raw(name, shape, stored=stored, device=device, part=part)
        self.nbytes += x.nbytes
        return x


class _Seat(Solo):
    """A rank among others that are not there."""

    def __init__(self, size: int) -> None:
        self.size = size


def describe_target(spec: V4TargetSpec) -> dict[str, Any]:
    """Keys beside those of every target."""
    layers = spec.layers
    return {
        "layers": {**asdict(layers), "num_layers": layers.num_layers},
        "layer_kinds": dict(Counter(layers.kinds)),
        "hashed_layers": sum(layers.hashed),
        "engram": _describe_engram(spec),
    }


def _describe_engram(spec: V4TargetSpec) -> dict[str, Any] | None:
    engram = spec.engram
    if engram is None:
        return None
    rows = dict(zip(engram.layers, engram.rows, strict=True))
    return {"rows": rows, "width": engram.width, "longest": engram.longest}


def describe_draft(spec: V4DraftSpec) -> dict[str, Any]:
    """Keys beside those of every draft."""
    return {
        "layers": {**asdict(spec.layers), "num_layers": spec.layers.num_layers},
        "windows": [spec.layers.window] * spec.layers.num_layers,
        "causal": [False] * spec.layers.num_layers,
    }


def weight_bytes(
    folder: Path,
    target: V4TargetSpec,
    draft: V4DraftSpec | None,
    dtype: torch.dtype,
    size: int = 1,
    *,
    data_attention: bool = False,
) -> dict[str, int]:
    """Bytes of weights that one of `size` ranks holds.

    Args:
        folder: The checkpoint.
        target: What it is.
        draft: The drafter in it, if it is to be held.
        dtype: Of weights that are not packed.
        size: Ranks.
        data_attention: Do they share requests, not heads?
    """
    at = Placement(dtype, torch.device("meta"), _Seat(size), data_attention)
    with (weights := _Scales(folder)):
        network = families.build_target(target, weights, at, 1)
        found = {"target": weights.nbytes, "draft": 0}
        if draft is not None:
            families.build_draft(draft, weights, network, at, 1)
            found["draft"] = weights.nbytes - found["target"]
    return found


def state_bytes(
    spec: AnyTarget | AnyDraft, most_queries: int, dtype: torch.dtype
) -> tuple[int, float]:
    """Bytes a request takes however short it is, and those of each of its tokens."""
    at = Placement(dtype, torch.device("meta"))
    block = families.block_size(spec, 1) if isinstance(spec, V4TargetSpec) else 1
    return (
        families.bytes_a_row(spec, most_queries, at),
        families.bytes_a_block(spec, block, at) / block,
    )


def gpus_needed(
    folder: Path,
    target: V4TargetSpec,
    draft: V4DraftSpec | None,
    dtype: torch.dtype,
    num_reqs: int,
    request: float,
    whole: int,
) -> dict[str, Any]:
    """The smallest number of GPUs that weights and requests fit on, by what ranks share.

    Args:
        folder: The checkpoint.
        target: What it is.
        draft: Its drafter, if it is to be held.
        dtype: Of weights that are not packed.
        num_reqs: Requests at once.
        request: Bytes of one.
        whole: Bytes of weights of one rank alone.

    Returns:
        What a GPU holds, and by `--attention-parallel`: `gpus` (None where no number that the heads
        can be dealt to is enough), and what each has of weights and of requests at that number.
    """
    groups = target.layers.o_groups
    sizes = [n for n in range(1, groups + 1) if groups % n == 0]

    def layout(*, data: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for size in sizes:
            how: dict[str, Any] = {"size": size, "data_attention": data}
            held = whole
            if size > 1:  # a pass over all headers takes seconds
                held = sum(weight_bytes(folder, target, draft, dtype, **how).values())
            kept = (-(-num_reqs // size) if data else num_reqs) * request
            fits = held + kept <= GPU_BYTES * USABLE
            found = {
                "gpus": size if fits else None,
                "weight_bytes_each": held,
                "kv_bytes_each": kept,
                "bytes_each": held + kept,
            }
            if fits:
                break
        return found

    layouts = {"tensor": layout(data=False), "data": layout(data=True)}
    return {"gpu_bytes": GPU_BYTES, "usable": USABLE, "attention_parallel": layouts}
