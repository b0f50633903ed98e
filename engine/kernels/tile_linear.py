"""Products of up to 128 rows, in one tile of outputs for each multiprocessor.

y = x W^T, or an MLP's gate and up with their activation, silu(x G^T) * (x U^T).

torch's products are cut by rules for any shape, and start when the kernel before them has ended.
Here the width of a tile is chosen so that nearly every multiprocessor has one and none has two:
then all of the memory's rate is asked for until the end. A tile may be two blocks of columns wide:
12288 outputs are 128 tiles of 64 and 32. Blocks are copied as such (TMA), many of them ahead.

Gate and up come from one block [2, BLOCK_N, BLOCK_K] of the weight [2, F, K], which one tensor core
instruction multiplies, so that a thread holds gate and up of the same output. Both are rounded
before the activation, as `engine.kernels.activation` has it.

With more rows it is arithmetic that takes the time, at the rate that a card's power allows: gate
and up in tiles of 128 x 128 were 5 to 10 % faster than torch's by themselves at 512, 1024 and 2048
rows, and rounds of 64, 128 and 256 requests were as long as before.

Sums are float32. A row has the same bits beside any others that are multiplied in the same tiles.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels import launch
from engine.kernels.activation import gate_times_up, silu_mul_ref
from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_FILLED = 0.9
"""Share of the multiprocessors that must have a tile; with less, torch is as fast."""

_SHARED = 227 << 10
"""Bytes of shared memory that a program may need."""

_ROOM = 200 << 10
"""Bytes of it for inputs on their way."""

MOST_TILED_ROWS = 128

_WIDTHS = ((32, 0), (32, 16), (64, 0), (64, 32))
"""Columns of a tile, in one block or two."""


class Tiles(NamedTuple):
    """How a product is cut, and how far ahead its inputs are asked for."""

    rows: int  # all there are
    columns: int
    more: int  # columns of a second block, or 0
    inputs: int
    stages: int
    warps: int


def choose_tiles(rows: int, columns: int, processors: int, *, gated: bool) -> Tiles | None:
    """How to cut a product; None: torch is as fast. A fixed table.

    Measured on an H200, Qwen3-8B, each product in turn among all of a layer's, us a layer that
    torch takes more: 64 rows: q, k, v 1.0, o 2.6, gate and up 4.5, down 3.6, of 129; half of each,
    as two ranks have them: 0.9, 2.1, 4.8 and 2.6 of 78. 32 rows: gate and up 2.3, the others less.
    128 rows: gate and up 4.5 of 142; the others, in tiles of 32 columns, much less: a round of 16
    requests took 7.86 ms instead of 6.99.

    Args:
        rows: T.
        columns: Of the outputs: with `gated`, F.
        processors: Multiprocessors.
        gated: Of gate and up.
    """
    if not (16 if gated else 32) < rows <= (MOST_TILED_ROWS if gated else 64):
        return None
    return _one_each(64 if rows <= 64 else 128, columns, processors, gated=gated)


@cache
def _one_each(block_m: int, columns: int, processors: int, *, gated: bool) -> Tiles | None:
    """Tiles of all rows, of which nearly every multiprocessor has one; None: there are none."""
    inputs, warps = (128, 4) if block_m == 64 else (64, 8)
    for width, more in _WIDTHS:
        tiles = triton.cdiv(columns, width + more)
        if _FILLED * processors <= tiles <= processors:
            stage = (block_m + (1 + gated) * (width + more)) * inputs * 2
            return Tiles(block_m, width, more, inputs, min(_ROOM // stage, 8), warps)
    return None


def takes_tiles(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """May `weight` [N, K], with `bias` [N] or None, be multiplied here?"""
    return (
        bias is None
        and weight.is_cuda
        and weight.is_floating_point()
        and weight.itemsize == 2
        and launch.capable(weight.device)
        and launch.shared_memory(weight.device) >= _SHARED
        and fits(weight)
    )


def fits(weight: torch.Tensor) -> bool:
    """Can blocks of `weight` [N, K] and of outputs be copied: do their rows begin at 16 bytes?"""
    columns, width = weight.shape
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return aligned and columns % 16 == 0 and width % 8 == 0


def tile_linear_ref(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """`tile_linear_triton` in torch: the definition a kernel is held to."""
    y = torch.nn.functional.linear(x, weight)
    return silu_mul_ref(y) if gated else y


def tile_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, tiles: Tiles, *, gated: bool = False
) -> torch.Tensor:
    """Multiply; activate.

    Args:
        x: [T, K], bfloat16 or float16; T is at most `tiles.rows`.
        weight: [N, K], dtype as x, rows side by side; N a multiple of 16, K of 8.
        tiles: As `choose_tiles` or a test gives them.
        gated: `weight` is an MLP's gate over its up.

    Returns:
        [T, N] in x's dtype; gated, [T, N / 2].

    Raises:
        ValueError: Shapes do not go together, or rows do not begin at 16 bytes.
    """
    dims = Dims()
    dims.check("x", x, "T K")
    dims.check("weight", weight, "N K", x.dtype)
    if not fits(weight):
        raise ValueError(f"weight: rows of {tuple(weight.shape)} do not begin at 16 bytes")
    if len(x) > tiles.rows:
        raise ValueError(f"x: {len(x)} rows, at most {tiles.rows} can be")
    gates = 2 if gated else 1
    rows, columns, width = x.shape[0], weight.shape[0] // gates, weight.shape[1]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    x, seen = x.contiguous(), weight.view(gates, columns, width)
    more = tiles.more or tiles.columns  # of what is not used, if there is no second block
    of = TensorDescriptor.from_tensor
    _tile_linear_kernel[(triton.cdiv(columns, tiles.columns + tiles.more),)](
        of(out, [tiles.rows, tiles.columns]),
        of(out, [tiles.rows, more]),
        of(x, [tiles.rows, tiles.inputs]),
        of(seen, [gates, tiles.columns, tiles.inputs]),
        of(seen, [gates, more, tiles.inputs]),
        K=width,
        GATES=gates,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        MORE_N=tiles.more,
        BLOCK_K=tiles.inputs,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        **dependent(x),
    )
    return out


@triton.jit
def _tile_linear_kernel(
    out_desc,  # [T, N], out, in blocks [BLOCK_M, BLOCK_N]; T <= BLOCK_M
    more_out_desc,  # the same in blocks [BLOCK_M, MORE_N]
    x_desc,  # [T, K], in blocks [BLOCK_M, BLOCK_K]
    w_desc,  # [GATES, N, K], in blocks [GATES, BLOCK_N, BLOCK_K]
    more_w_desc,  # the same in blocks [GATES, MORE_N, BLOCK_K]
    K: tl.constexpr,
    GATES: tl.constexpr,  # 2: gate and up; 1: a product alone
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MORE_N: tl.constexpr,  # 0: one block
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """All rows of one tile of columns. What lies beyond an end is read as 0 and not written."""
    wait_for_inputs(DEPENDENT)
    column = tl.program_id(0) * (BLOCK_N + MORE_N)
    total = tl.zeros([BLOCK_M, GATES * BLOCK_N], dtype=tl.float32)
    if MORE_N:
        more = tl.zeros([BLOCK_M, GATES * MORE_N], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = x_desc.load([0, k])
        w = tl.reshape(w_desc.load([0, column, k]), [GATES * BLOCK_N, BLOCK_K])
        if MORE_N:
            more_w = more_w_desc.load([0, column + BLOCK_N, k])
            more_w = tl.reshape(more_w, [GATES * MORE_N, BLOCK_K])
        total = tl.dot(x, w.T, total)
        if MORE_N:
            more = tl.dot(x, more_w.T, more)
    dtype: tl.constexpr = out_desc.dtype
    out_desc.store([0, column], _finished(total, GATES, BLOCK_M, BLOCK_N, dtype))
    if MORE_N:
        rest = _finished(more, GATES, BLOCK_M, MORE_N, dtype)
        more_out_desc.store([0, column + BLOCK_N], rest)


@triton.jit
def _finished(
    total, GATES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, dtype: tl.constexpr
):
    """[BLOCK_M, BLOCK_N] outputs of the sums [BLOCK_M, GATES * BLOCK_N]."""
    if GATES == 1:
        out = total.to(dtype)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        out = gate_times_up(gate, up, dtype)
    return out
