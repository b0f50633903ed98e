"""Products with packed weights: y = x W^T, W unpacked where it is multiplied.

Activations keep their dtype; sums are float32. Scales multiply weights, which powers of two leave
exact in bfloat16, or, where they are float32, the sum of their block.

Reads W once for up to BLOCK_M rows: out * in bytes of fp8, or half of that and 1/32 of fp4.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.packed import FP8_BLOCK, Packed, check_packed, unpack
from engine.kernels.packed_jit import fp4_sum, fp8_sum
from engine.kernels.packed_layout import Laid, PairedFp4, lay_out


class PackedLinear:
    """An immutable packed matrix, applied to rows; no bias."""

    __slots__ = ("in_features", "laid", "out_features", "packed")

    def __init__(self, packed: Packed) -> None:
        """Take over one matrix."""
        check_packed(packed)
        self.packed = packed
        self.laid = lay_out(packed) if packed.weight.is_cuda else None
        self.out_features, self.in_features = packed.out_features, packed.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` [T, in]; returns [T, out] in x's dtype."""
        return packed_linear(x, self.packed, self.laid)


class PackedGroups:
    """A packed matrix for each group of inputs, side by side; no bias."""

    __slots__ = ("each", "laid")

    def __init__(self, each: list[Packed]) -> None:
        """Take over matrices [out, in] of fp8, of one size."""
        self.each, self.laid = list[PackedLinear](), None
        if each[0].weight.is_cuda:
            parts = torch.stack([m.weight for m in each]), torch.stack([m.scale for m in each])
            self.laid = lay_out(Packed("fp8", *parts, each[0].block))
        else:
            self.each = [PackedLinear(one) for one in each]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` [T, groups, in]; returns [T, groups * out] in x's dtype."""
        if self.laid is not None:
            return packed_groups_triton(x, self.laid)
        return torch.cat([f(x[:, g].contiguous()) for g, f in enumerate(self.each)], dim=1)


def packed_linear(x: torch.Tensor, packed: Packed, laid: Laid | None = None) -> torch.Tensor:
    """Multiply.

    Args:
        x: [T, in], float32, bfloat16 or float16.
        packed: One matrix.
        laid: The same for kernels, if that is known.

    Returns:
        [T, out] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T K")
    if dims["K"] != packed.in_features:
        raise ValueError(f"x: {dims['K']} columns, the matrix has {packed.in_features}")
    if not x.is_cuda:
        return packed_linear_ref(x, packed)
    return packed_linear_triton(x, laid or lay_out(packed))


def packed_linear_ref(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """`packed_linear` in torch: the definition a kernel is held to."""
    return (x.float() @ unpack(packed).t()).to(x.dtype)


def packed_linear_triton(
    x: torch.Tensor, laid: Laid, *, num_parts: int | None = None
) -> torch.Tensor:
    """`packed_linear` as one launch, or two where few programs would read much each.

    Args:
        x: [T, in].
        laid: One matrix.
        num_parts: Of the inputs, whose sums are taken apart; None: by the matrix's size.
    """
    one = laid.weight[None], laid.scale[None]
    if isinstance(laid, PairedFp4):
        whole: Laid = PairedFp4(*one, laid.in_features)
    else:
        whole = Packed("fp8", *one, laid.block)
    return packed_groups_triton(x[:, None], whole, num_parts=num_parts)


def packed_groups_triton(
    x: torch.Tensor, laid: Laid, *, num_parts: int | None = None
) -> torch.Tensor:
    """Each group's inputs [T, G, in] times its own matrix of [G, out, in]: [T, G * out]."""
    x = x.contiguous()
    rows, groups, width = x.shape
    columns = laid.out_features
    out = torch.empty((rows, groups * columns), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    parts = num_parts or parts_of(width, groups * columns)
    tile = block_sizes(rows, groups * columns)
    grid = triton.cdiv(rows, tile.m), triton.cdiv(columns, tile.n)
    apart = parts > 1 and grid[0] * grid[1] * groups < _ENOUGH
    sums = out
    if apart:
        sums = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    _packed_linear_kernel[(*grid, groups * parts if apart else groups)](
        sums,
        x,
        *packed_arguments(laid),
        rows,
        groups,
        K=width,
        N=columns,
        PARTS=parts,
        APART=apart,
        BLOCK_K=scale_inputs(laid),
        SCALE_N=scale_rows(laid),
        ASM=runs_asm(x),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if apart:
        _add_parts_kernel[(triton.cdiv(out.numel(), _ADDED),)](
            out, sums, out.numel(), PARTS=parts, BLOCK=_ADDED
        )
    return out


_ENOUGH = 264
"""Programs that keep a GPU's memory busy; with fewer, parts of the inputs are programs, too."""

_ADDED = 1024


def parts_of(width: int, columns: int) -> int:
    """Parts of a row's sum; by the matrix alone, as sums are added in the order of parts."""
    parts = 4 if width >= 4096 and columns <= 4096 else 2
    few = width >= 2048 and columns <= 8192
    return parts if few and width % (parts * FP8_BLOCK) == 0 else 1


class Tile(NamedTuple):
    """Rows and outputs of a program's tile, and how it is run."""

    m: int
    n: int
    warps: int
    stages: int


def block_sizes(rows: int, columns: int) -> Tile:
    """By the sizes; no sum depends on it, a row has the same bits in any batch."""
    if rows <= 16:
        return Tile(16, 64, 2, 4)
    wide = columns >= 4096 if rows > 128 else columns >= 16384
    if wide:
        return Tile(128, 128, 8, 3)
    return Tile(64, 64, 4, 3) if rows <= 128 else Tile(128, 64, 4, 3)


def packed_arguments(laid: Laid) -> tuple[torch.Tensor, int, torch.Tensor, int, int]:
    """Weights and scales of several matrices, with their strides from one to the next."""
    weight, scale = laid.weight.view(torch.uint8), laid.scale
    return weight, weight.stride(0), scale, scale.stride(0), scale.stride(1)


def scale_rows(laid: Laid) -> int:
    """Outputs that share a scale; 0: fp4, a row has its own."""
    return 0 if isinstance(laid, PairedFp4) else laid.block


def scale_inputs(laid: Laid) -> int:
    """Inputs of a step of a tile: those that share a scale, or a word of them."""
    return FP8_BLOCK if isinstance(laid, PairedFp4) else laid.block


def runs_asm(x: torch.Tensor) -> bool:
    """Are weights unpacked by instructions of a GPU?"""
    return x.is_cuda and x.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret


@triton.jit
def packed_tile(
    total,  # [BLOCK_N, BLOCK_M] float32
    x_at,  # [BLOCK_M] pointers
    w_ptr,  # one matrix, bytes
    scale_ptr,
    scale_row,
    column,  # [BLOCK_N] int64, live ones
    first,  # input; where a block of scales begins
    K: tl.constexpr,
    COUNT: tl.constexpr,  # inputs, K of them or whole blocks
    BLOCK_K: tl.constexpr,
    SCALE_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add rows times a matrix's columns."""
    if SCALE_N == 0:
        w_at = w_ptr + column * ((K + 127) // 128 * 64) + first // 2
        at_scale = scale_ptr + column * scale_row + first // 128
        total = fp4_sum(total, x_at + first, w_at, at_scale, COUNT, ASM)
    else:
        at_scale = scale_ptr + column // SCALE_N * scale_row + first // BLOCK_K
        total = fp8_sum(
            total, x_at + first, w_ptr + column * K + first, at_scale, COUNT, BLOCK_K, ASM
        )
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _packed_linear_kernel(
    out_ptr,  # [T, G, N], out; APART: [PARTS, T, G, N] float32
    x_ptr,  # [T, G, K]
    w_ptr,  # [G, N, K], or [G, N, K/2]; bytes
    w_group,
    scale_ptr,
    scale_group,
    scale_row,
    num_rows,
    num_groups,
    K: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_N: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group, first, count = tl.program_id(2).to(tl.int64), 0, PARTS
    if APART:
        first, count = group % PARTS, 1
        group = group // PARTS
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = row < num_rows
    # rows and columns beyond the end read the last one's instead, and are not written
    x_at = x_ptr + (tl.minimum(row, num_rows - 1) * num_groups + group) * K
    some = tl.minimum(column, N - 1)
    w_ptr += group * w_group
    scale_ptr += group * scale_group
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if PARTS == 1 or APART:
        at = first * (K // PARTS)
        total = packed_tile(
            total, x_at, w_ptr, scale_ptr, scale_row, some, at,
            K, K // PARTS, BLOCK_K, SCALE_N, ASM,
        )  # fmt: skip
    else:
        for part in tl.range(0, count):
            mine = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            mine = packed_tile(
                mine, x_at, w_ptr, scale_ptr, scale_row, some, part * (K // PARTS),
                K, K // PARTS, BLOCK_K, SCALE_N, ASM,
            )  # fmt: skip
            total += mine
    at = (row[None, :] * num_groups + group) * N + column[:, None]
    if APART:
        at += first * num_rows * num_groups * N
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=(column < N)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["count"])
def _add_parts_kernel(
    out_ptr,  # [count], out
    sums_ptr,  # [PARTS, count] float32
    count,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_ptr + part * count + at, mask=live, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=live)
