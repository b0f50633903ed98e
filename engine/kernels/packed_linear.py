"""Products with packed weights: y = x W^T, W unpacked where it is multiplied.

Activations keep their dtype; sums are float32. A tile of fp8 takes inputs of one block, whose scale
multiplies its sum; fp4 is unpacked with its scales, which is exact. Even and odd inputs of
fp4 are two products: no byte has to be taken apart in memory.

Reads W once for up to BLOCK_M rows: out * in bytes of fp8, or half of that and 1/32 of fp4.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.packed import FP4_GROUP, FP8_BLOCK, Packed, check_packed, unpack

_FP4_COLUMNS = 128
"""Inputs of a tile of fp4."""


class PackedLinear:
    """An immutable packed matrix, applied to rows; no bias."""

    __slots__ = ("in_features", "out_features", "packed")

    def __init__(self, packed: Packed) -> None:
        """Take over one matrix."""
        check_packed(packed)
        self.packed = packed
        self.out_features, self.in_features = packed.out_features, packed.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` [T, in]; returns [T, out] in x's dtype."""
        return packed_linear(x, self.packed)


def packed_linear(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Multiply.

    Args:
        x: [T, in], float32, bfloat16 or float16.
        packed: One matrix.

    Returns:
        [T, out] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T K")
    if dims["K"] != packed.in_features:
        raise ValueError(f"x: {dims['K']} columns, the matrix has {packed.in_features}")
    impl = packed_linear_triton if x.is_cuda else packed_linear_ref
    return impl(x, packed)


def packed_linear_ref(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """`packed_linear` in torch: the definition a kernel is held to."""
    return (x.float() @ unpack(packed).t()).to(x.dtype)


def packed_linear_triton(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """`packed_linear` as one launch."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty((rows, packed.out_features), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block_m, block_n = block_sizes(rows)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(packed.out_features, block_n))
    _packed_linear_kernel[grid](
        out,
        x,
        packed.weight.view(torch.uint8),
        packed.scale,
        rows,
        packed.scale.stride(0),
        K=width,
        N=packed.out_features,
        **packed_arguments(packed, width),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=3,
    )
    return out


def block_sizes(rows: int) -> tuple[int, int]:
    """Rows and outputs of a tile; no sum depends on them, a row has the same bits in any batch."""
    if rows <= 16:
        return 16, 64
    return (32, 128) if rows <= 32 else (64, 128)


def packed_arguments(packed: Packed, width: int) -> dict[str, object]:
    """What the tile loops are compiled for."""
    return {
        "FP4": packed.kind == "fp4",
        "POWERS": packed.scale.dtype == torch.uint8,
        "GROUP": FP4_GROUP,
        "BLOCK_K": _FP4_COLUMNS if packed.kind == "fp4" else FP8_BLOCK,
        "SCALE_N": FP8_BLOCK,
    }


@triton.jit
def power_of_two(b):
    """e8m0 bytes as float32, bit by bit; byte 0 is the one below float32's normal numbers."""
    bits = b.to(tl.int32) << 23
    bits = tl.where(b == 0, 1 << 22, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):
    """Four bits as float32."""
    low = (code & 7).to(tl.int32)
    # above the two smallest: exponent and one digit, moved to where float32 has them
    bits = tl.where(low > 1, (low << 22) + (126 << 23), tl.where(low == 1, 126 << 23, 0))
    value = bits.to(tl.float32, bitcast=True)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def packed_tile(
    total,  # [BLOCK_M, BLOCK_N] float32, sums so far
    x_ptr,  # + row offsets [BLOCK_M]
    x_live,  # [BLOCK_M]
    w_ptr,
    scale_ptr,
    scale_row,  # stride
    column,  # [BLOCK_N] int64, rows of the matrix
    n_live,  # [BLOCK_N]
    k,  # first input
    K: tl.constexpr,
    FP4: tl.constexpr,
    POWERS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_N: tl.constexpr,
):
    """Add the products of BLOCK_K inputs."""
    if FP4:
        at = k // 2 + tl.arange(0, BLOCK_K // 2)
        live = at < K // 2
        w_live = n_live[:, None] & live[None, :]
        byte = tl.load(w_ptr + column[:, None] * (K // 2) + at[None, :], mask=w_live, other=0)
        scale = tl.load(
            scale_ptr + column[:, None] * scale_row + (2 * at // GROUP)[None, :],
            mask=w_live,
            other=127,
        )
        power = power_of_two(scale)
        keep = x_live[:, None] & live[None, :]
        even = tl.load(x_ptr[:, None] + 2 * at[None, :], mask=keep, other=0.0)
        odd = tl.load(x_ptr[:, None] + 2 * at[None, :] + 1, mask=keep, other=0.0)
        low = (e2m1(byte & 15) * power).to(even.dtype)
        high = (e2m1(byte >> 4) * power).to(even.dtype)
        total = tl.dot(even, tl.trans(low), total, input_precision="ieee")
        total = tl.dot(odd, tl.trans(high), total, input_precision="ieee")
    else:
        at = k + tl.arange(0, BLOCK_K)
        live = at < K
        w_live = n_live[:, None] & live[None, :]
        byte = tl.load(w_ptr + column[:, None] * K + at[None, :], mask=w_live, other=0)
        w = byte.to(tl.float8e4nv, bitcast=True)
        keep = x_live[:, None] & live[None, :]
        x = tl.load(x_ptr[:, None] + at[None, :], mask=keep, other=0.0)
        part = tl.dot(x, tl.trans(w.to(x.dtype)), input_precision="ieee")
        at_scale = scale_ptr + (column // SCALE_N) * scale_row + k // BLOCK_K
        scale = tl.load(at_scale, mask=n_live, other=0)
        if POWERS:
            scale = power_of_two(scale)
        total += part * scale[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _packed_linear_kernel(
    out_ptr,  # [T, N], out
    x_ptr,  # [T, K]
    w_ptr,  # [N, K], or [N, K/2]; bytes
    scale_ptr,
    num_rows,
    scale_row,
    K: tl.constexpr,
    N: tl.constexpr,
    FP4: tl.constexpr,
    POWERS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_live, n_live = row < num_rows, column < N
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        total = packed_tile(
            total, x_ptr + row * K, x_live, w_ptr, scale_ptr, scale_row, column, n_live, k,
            K, FP4, POWERS, GROUP, BLOCK_K, SCALE_N,
        )  # fmt: skip
    at = row[:, None] * N + column[None, :]
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=x_live[:, None] & n_live[None, :])
