"""Bring the next product's weights into the L2 cache while a small kernel runs.

With few tokens a product streams its weights at the memory's speed, and between two products the
memory is idle: norms, rope, attention and activation take 2 to 10 us each and move next to nothing.
Programs added to their launches ask for the first bytes of every row of the weights that come next,
and are gone at once; the product then finds them in the cache. With a dependent launch they do not
even wait for the kernel before theirs: weights never change.

Needs compute capability 9.0 (cp.async.bulk.prefetch); elsewhere nothing is asked for.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.launch import is_capable

_MOST_TOKENS = 256
"""With more, products are bound by arithmetic and want nothing of this."""

_PROGRAMS = 128

NORM_BYTES = 10 << 20
"""What memory gives in the time of a norm or an activation."""

ROPE_BYTES = 20 << 20
"""What it gives in the time of rope and attention, and leaves room for K and V."""


def prefetching(
    weight: torch.Tensor | None, num_tokens: int, budget: int, num_warps: int
) -> dict[str, Any]:
    """Launch arguments for a kernel that begins with `prefetch_rows` in added programs.

    Args:
        weight: [out, in] of the next product, rows contiguous; None = nothing to ask for.
        num_tokens: T of this step.
        budget: Bytes to ask for.
        num_warps: Of the kernel.
    """
    each = rows = row_bytes = 0
    if weight is not None and num_tokens <= _MOST_TOKENS and is_capable(weight):
        rows, row_bytes = weight.shape[0], weight.stride(0) * weight.element_size()
        each = min(budget // rows // 128 * 128, row_bytes) if row_bytes % 16 == 0 else 0
    return {
        "next_ptr": weight if each else None,
        "next_rows": rows,
        "next_row_bytes": row_bytes,
        "next_bytes": each,
        "NEXT_PROGRAMS": _PROGRAMS if each else 0,
        "LANES": 32 * num_warps,
        "num_warps": num_warps,
    }


@triton.jit
def prefetch_rows(
    program,
    next_ptr,  # [rows, *] any dtype
    next_rows,
    next_row_bytes,
    next_bytes,
    NEXT_PROGRAMS: tl.constexpr,
    LANES: tl.constexpr,  # threads of a program
):
    """Share `program` of NEXT_PROGRAMS: ask for the first next_bytes of rows, one a thread."""
    if program < NEXT_PROGRAMS:
        base = next_ptr.to(tl.int64)
        for first in range(program * LANES, next_rows, NEXT_PROGRAMS * LANES):
            row = tl.minimum(first + tl.arange(0, LANES), next_rows - 1)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [
                    base + row.to(tl.int64) * next_row_bytes,
                    tl.zeros((LANES,), tl.int32) + next_bytes,
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
