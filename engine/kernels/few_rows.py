"""Products of up to 16 rows with a large matrix: y = x W^T + b, as long as W takes to be read.

torch's products end a graph's overlap: each starts when the kernel before it has ended, and its
own start is seen. This one is set up while its predecessor still runs (engine.kernels.launch), and
where a matrix has few outputs, parts of its inputs are programs of their own, so that all of the
memory's rate is asked for. The program that ends last adds the parts, in their order. Of an MLP's
gate and up, a program takes rows of both, and writes what the next product needs: one launch less.

W stands on the left, [BLOCK_N, k] times rows [k, BLOCK_M]: a tensor core's tile has 64 rows at the
least, and only outputs are so many. Sums are float32. A row has the same bits beside any others
that are multiplied here. Reads out * in * itemsize bytes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels import launch
from engine.kernels.activation import gate_times_up
from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

BLOCK_N = 64
MOST_ROWS = 16
"""More take a tensor core's tile apart, and torch's product or `tile_linear` is faster."""

BLOCK_K = 128
_ENOUGH = 192
"""Programs that keep the memory of an H200 busy: more than one for each multiprocessor."""

_MOST_PARTS = 4


class FewRows(NamedTuple):
    """How a matrix is multiplied when rows are few."""

    parts: int  # of the inputs, a program each
    counts: torch.Tensor  # [tiles] int32: parts of a tile, or of a head, that have ended; 0 between

    @property
    def stages(self) -> int:
        """Loads under way."""
        return 4 if self.parts > 1 else 3


def few_rows_of(weight: torch.Tensor) -> FewRows | None:
    """How to multiply with `weight` [out, in]; None: torch is as fast, however few rows.

    Measured on an H200, in a graph of several copies of a matrix, each product behind a small
    kernel, [out, in] of Qwen3-8B and of half of it: at up to 16 rows 3 to 17 % shorter than
    torch's; at 64 rows as long or longer, at 32 much longer; with a vocabulary's outputs as long
    or longer.
    """
    (columns, width), device = weight.shape, weight.device
    tiles = triton.cdiv(columns, BLOCK_N)
    parts = parts_of(tiles, width)
    whole = weight.is_contiguous() and weight.itemsize == 2
    if not (weight.is_cuda and whole and launch.capable(device) and parts):
        return None
    counts = torch.zeros(tiles, dtype=torch.int32, device=device)
    return FewRows(parts, counts)


def parts_of(tiles: int, width: int) -> int:
    """Parts of the inputs of a matrix with so many tiles of outputs; 0: it is not for this."""
    if not 48 <= tiles <= 1024:
        return 0
    parts = 1
    while parts < _MOST_PARTS and tiles * parts < _ENOUGH:
        parts *= 2
    return parts if width % (parts * BLOCK_K) == 0 else 0


def few_rows_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`few_rows_triton` in torch: the definition a kernel is held to."""
    return torch.nn.functional.linear(x, weight, bias)


def few_rows_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    way: FewRows,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """Multiply.

    Args:
        x: [T, in], T up to 16, dtype as weight.
        weight: [out, in], rows side by side.
        bias: [out], or None.
        way: As `few_rows_of` or a test gives it; one call with it at a time.
        gated: The outputs are gate, then up: give `engine.kernels.activation.silu_mul` of them.

    Returns:
        [T, out] in x's dtype; gated, [T, out / 2].

    Raises:
        ValueError: There are more rows, or `way` is of another matrix.
    """
    check_few(x, weight, way)
    rows, (columns, width) = x.shape[0], weight.shape
    x = x.contiguous()
    wide = columns // 2 if gated else columns
    out = torch.empty((rows, wide), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = triton.cdiv(columns, BLOCK_N)
    sums = out
    if way.parts > 1:
        shape = tiles, way.parts, BLOCK_N * MOST_ROWS
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    _few_rows_kernel[(tiles * way.parts,)](
        out,
        sums,
        way.counts,
        x,
        weight,
        out if bias is None else bias,
        rows,
        columns,
        K=width,
        PARTS=way.parts,
        BIAS=bias is not None,
        GATED=gated,
        BLOCK_M=MOST_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=way.stages,
        num_warps=4,
        **dependent(x),
    )
    return out


def check_few(x: torch.Tensor, weight: torch.Tensor, way: FewRows) -> None:
    """Raise ValueError where x [T, in] and weight [out, in] cannot be multiplied in this `way`."""
    dims = Dims()
    dims.check("x", x, "T K")
    dims.check("weight", weight, "N K")
    if len(x) > MOST_ROWS:
        raise ValueError(f"x: {len(x)} rows, at most {MOST_ROWS} can be")
    if weight.shape[1] % (way.parts * BLOCK_K):  # the rest would be left out
        raise ValueError(f"weight: {weight.shape[1]} inputs do not divide into {way.parts} parts")


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    out_ptr,  # [T, N], out; GATED: [T, N/2]
    sums_ptr,  # [tiles, PARTS, BLOCK_N, BLOCK_M] float32, between programs
    count_ptr,  # [tiles] int32, zeros before and after
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]
    num_rows,
    N,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    # rows and columns beyond the end read the last one's instead, and are not written
    if GATED:  # a gate and its up side by side
        column = tile.to(tl.int64) * (BLOCK_N // 2) + lane // 2
        column = tl.minimum(column, N // 2 - 1) + lane % 2 * (N // 2)
    else:
        column = tl.minimum(tile.to(tl.int64) * BLOCK_N + lane, N - 1)
    total = part_of_sum(
        x_ptr, w_ptr, column, row, num_rows, part, K, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
    )  # fmt: skip
    last = True
    if PARTS > 1:
        mine = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        sums_ptr += tile.to(tl.int64) * (PARTS * BLOCK_N * BLOCK_M)
        tl.store(sums_ptr + part * (BLOCK_N * BLOCK_M) + mine, total)
        tl.debug_barrier()  # one thread tells for all of the program
        last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu") == PARTS - 1
        if last:
            tl.store(count_ptr + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for p in tl.static_range(PARTS):
                at = sums_ptr + p * (BLOCK_N * BLOCK_M) + mine
                total += tl.load(at, cache_modifier=".cg")
    if last:
        if BIAS:
            total += tl.load(bias_ptr + column).to(tl.float32)[:, None]
        out = total.to(out_ptr.dtype.element_ty)
        wide, columns = N, tile.to(tl.int64) * BLOCK_N + lane
        if GATED:
            out = _gated(out, BLOCK_N // 2, BLOCK_M)
            wide = N // 2
            columns = tile.to(tl.int64) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = row.to(tl.int64)[None, :] * wide + columns[:, None]
        tl.store(out_ptr + at, out, mask=(columns < wide)[:, None] & (row < num_rows)[None, :])


@triton.jit
def part_of_sum(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    column,  # [BLOCK_N] int64: rows of w
    row,  # [BLOCK_M]: rows of x; beyond the end, the last one is read
    num_rows,
    part,  # of K
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] float32: what one part of the inputs adds to the outputs."""
    first = part * (K // PARTS)
    w_at = w_ptr + column * K + first
    x_at = x_ptr + tl.minimum(row, num_rows - 1) * K + first
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in tl.range(0, K // PARTS // BLOCK_K, num_stages=STAGES):
        at = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(w_at[:, None] + at[None, :], eviction_policy="evict_first")
        x = tl.load(x_at[None, :] + at[:, None], eviction_policy="evict_last")
        total = tl.dot(w, x, total)
    return total


@triton.jit
def _gated(x, HALF: tl.constexpr, BLOCK_M: tl.constexpr):
    """Gates and ups [2 HALF, BLOCK_M] in turn, as `silu_mul` has it: [HALF, BLOCK_M]."""
    pairs = tl.permute(tl.reshape(x.to(tl.float32), [HALF, 2, BLOCK_M]), [0, 2, 1])
    gate, up = tl.split(pairs)
    return gate_times_up(gate, up, x.dtype)
