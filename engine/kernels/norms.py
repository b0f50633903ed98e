"""RMS norm (Zhang and Sennrich, 2019), alone or with the residual sum before it.

    y = x / sqrt(mean(x^2) + eps) * weight

Over the last dimension, statistics in float32; rounded to x's dtype before and after the weight.
Moves 2 * x bytes; with the sum 4 * x, one read less than a sum and a norm by themselves.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_TILE = 2048
"""Elements a program aims at: many short rows (heads), or one long one."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x`.

    Args:
        x: [..., H], float32, bfloat16 or float16; any strides but the last, which is 1.
        weight: [H] in x's dtype.
        eps: Added to the mean square.

    Returns:
        [..., H] in x's dtype.
    """
    impl = rms_norm_triton if x.is_cuda else rms_norm_ref
    return impl(x, weight, eps)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in torch: the definition a kernel is held to."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` as one launch; short rows share a program."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x if x.ndim == 3 else x.reshape(-1, 1, x.shape[-1])
    _launch(rows, rows, weight, eps, out, out, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's output to the residual stream and normalise the sum for the next layer.

    Args:
        x: [T, H], float32, bfloat16 or float16.
        residual: [T, H] in x's dtype.
        weight: [H] in x's dtype.
        eps: Added to the mean square.

    Returns:
        The normed sum and the sum, both [T, H] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T H")
    dims.check("residual", residual, "T H", x.dtype)
    dims.check("weight", weight, "H", x.dtype)
    impl = add_rms_norm_triton if x.is_cuda else add_rms_norm_ref
    return impl(x, residual, weight, eps)


def add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in torch: the definition a kernel is held to."""
    total = x + residual
    return rms_norm_ref(total, weight, eps), total


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` as one launch."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x[:, None], residual[:, None], weight, eps, normed, total, add=True)
    return normed, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor,
    *,
    add: bool,
) -> None:
    """Rows [outer, inner, H] of x and residual to contiguous out and total."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if residual.stride(-1) != 1:
        residual = residual.contiguous()
    outer, inner, width = x.shape
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    _rms_norm_kernel[(triton.cdiv(outer * inner, rows),)](
        out,
        total,
        x,
        x.stride(0),
        x.stride(1),
        residual,
        residual.stride(0),
        residual.stride(1),
        weight,
        eps,
        outer * inner,
        inner,
        H=width,
        ADD=add,
        ROWS=rows,
        BLOCK=block,
        **dependent(x),
        num_warps=8 if block > _TILE else 4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out_ptr,  # [outer, inner, H], out
    total_ptr,  # [outer, inner, H], out; ADD only
    x_ptr,  # [outer, inner, H]
    x_outer,
    x_inner,
    residual_ptr,  # [outer, inner, H]; ADD only
    residual_outer,
    residual_inner,
    weight_ptr,  # [H]
    eps,
    num_rows,  # outer * inner
    inner,
    H: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    # the one thing that comes from far away, and is there before the inputs are
    weight = tl.load(weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < num_rows)[:, None] & (column < H)[None, :]
    at_outer, at_inner = row // inner, row % inner
    dtype = out_ptr.dtype.element_ty
    at = (at_outer * x_outer + at_inner * x_inner)[:, None] + column[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    at_out = row[:, None] * H + column[None, :]
    if ADD:
        at = (at_outer * residual_outer + at_inner * residual_inner)[:, None] + column[None, :]
        x += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + at_out, total, mask=live)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)
    normed = (x * scale[:, None]).to(dtype).to(tl.float32)
    tl.store(out_ptr + at_out, (normed * weight[None, :]).to(dtype), mask=live)
