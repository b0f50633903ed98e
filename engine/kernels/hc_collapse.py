"""Hyper-connections (mHC): a token's residual streams become one input.

    y[t, c] = sum_k pre[t, k] * x[t, k, c]

in float32, from 0 upwards in the order of the streams, every product and every sum rounded by
itself; then rounded once to x's dtype. No number of one token or column touches another, so that a
token's bits depend on its own streams alone: collapsing the shards of a batch and collapsing the
batch give the same bits. A fused multiply-add would round less often than torch does, and is off.

Moves T * (S + 1) * H values and T * S coefficients.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_BLOCK = 1024


def hc_collapse(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Collapse streams.

    Args:
        x: [T, S, H], float32, bfloat16 or float16; any strides but the last, which is 1.
        pre: [T, S] float32.

    Returns:
        [T, H] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T S H")
    dims.check("pre", pre, "T S", torch.float32)
    impl = hc_collapse_triton if x.is_cuda else hc_collapse_ref
    return impl(x, pre)


def hc_collapse_ref(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """`hc_collapse` in torch: the definition a kernel is held to."""
    out = torch.zeros(x.shape[0], x.shape[2], dtype=torch.float32, device=x.device)
    for k in range(x.shape[1]):
        out = out + pre[:, k, None] * x[:, k].float()
    return out.to(x.dtype)


def hc_collapse_triton(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """`hc_collapse` as one launch."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_tokens, num_streams, width = x.shape
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if num_tokens:
        # the tile does not depend on the number of tokens
        block = min(_BLOCK, triton.next_power_of_2(width))
        _hc_collapse_kernel[(num_tokens, triton.cdiv(width, block))](
            out,
            x,
            x.stride(0),
            x.stride(1),
            pre,
            pre.stride(0),
            pre.stride(1),
            H=width,
            S=num_streams,
            BLOCK=block,
            **dependent(x),
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _hc_collapse_kernel(
    out_ptr,  # [T, H], out
    x_ptr,  # [T, S, H]
    x_token,
    x_stream,
    pre_ptr,  # [T, S]
    pre_token,
    pre_stream,
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < H
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(S):
        x = tl.load(x_ptr + token * x_token + k * x_stream + column, mask=live, other=0.0)
        total = total + tl.load(pre_ptr + token * pre_token + k * pre_stream) * x.to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=live)
