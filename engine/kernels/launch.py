"""Programmatic dependent launch: a kernel's start overlaps the end of the one before it.

With few requests a layer's small kernels run 2 to 4 us each, and much of that is starting them. A
dependent kernel may be set up while its predecessor still runs; it then waits, before it touches
what kernels write, for all of the predecessor's writes. Each kernel says early that the next may be
set up. What it reads before that must be older than a kernel that is launched ordinarily, and so
begins when all before it have ended: weights are, and a step's lengths, KV blocks, slots and
angles, as long as networks look up embeddings, which torch does, right before their first layer.

Every kernel launched so must wait: "my predecessor is done" then also means that all before it are.
Needs compute capability 9.0; elsewhere, and in the interpreter, launches are ordinary.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs


def dependent(x: torch.Tensor) -> dict[str, Any]:
    """Launch arguments for a kernel with a DEPENDENT flag, on the device of `x`."""
    if x.is_cuda and capable(x.device):
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@cache
def capable(device: torch.device) -> bool:
    """Has this CUDA device such launches?"""
    return not knobs.runtime.interpret and torch.cuda.get_device_capability(device)[0] >= 9


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; 1 elsewhere."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; 0 if there is no telling."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # its type has no such name


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Call before anything is written, and before anything is read that is not older (see above).

    What is older is better loaded before: it comes while the predecessor ends.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
