"""Hyper-connections (mHC): a sublayer's output goes back into the residual streams.

    R'[t, j, c] = post[t, j] * y[t, c] + sum_i comb[t, i, j] * R[t, i, c]

in float32, terms in this order, every product and every sum rounded by itself, then once to R's
dtype. `comb` is used transposed: its first index is the old stream, its second the new one.

Moves T * (2 * S + 1) * H values and T * (S + 1) * S coefficients.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_BLOCK = 1024


def hc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """Mix a sublayer's output and the streams it came from.

    Args:
        y: [T, H] in streams' dtype.
        streams: [T, S, H], float32, bfloat16 or float16.
        post: [T, S] float32, share of `y` in each new stream.
        comb: [T, S, S] float32, share of old stream i in new stream j.

    Returns:
        [T, S, H] in streams' dtype.
    """
    dims = Dims()
    dims.check("streams", streams, "T S H")
    dims.check("y", y, "T H", streams.dtype)
    dims.check("post", post, "T S", torch.float32)
    dims.check("comb", comb, "T S S", torch.float32)
    impl = hc_post_triton if y.is_cuda else hc_post_ref
    return impl(y, streams, post, comb)


def hc_post_ref(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """`hc_post` in torch: the definition a kernel is held to."""
    out = post[:, :, None] * y[:, None].float()
    for i in range(streams.shape[1]):
        out = out + comb[:, i, :, None] * streams[:, i, None].float()
    return out.to(streams.dtype)


def hc_post_triton(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """`hc_post` as one launch: every stream is read and written once."""
    y, streams = y.contiguous(), streams.contiguous()
    post, comb = post.contiguous(), comb.contiguous()
    num_tokens, num_streams, width = streams.shape
    out = torch.empty_like(streams)
    if num_tokens:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _hc_post_kernel[(num_tokens, triton.cdiv(width, block))](
            out,
            y,
            streams,
            post,
            comb,
            H=width,
            S=num_streams,
            BLOCK_S=triton.next_power_of_2(num_streams),
            BLOCK=block,
            **dependent(y),
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def _hc_post_kernel(
    out_ptr,  # [T, S, H], out
    y_ptr,  # [T, H]
    streams_ptr,  # [T, S, H]
    post_ptr,  # [T, S]
    comb_ptr,  # [T, S, S]
    H: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    new = tl.arange(0, BLOCK_S)
    live, real = column < H, new < S
    y = tl.load(y_ptr + token * H + column, mask=live, other=0.0).to(tl.float32)
    post = tl.load(post_ptr + token * S + new, mask=real, other=0.0)
    total = post[:, None] * y[None, :]
    for i in tl.static_range(S):
        old = tl.load(streams_ptr + (token * S + i) * H + column, mask=live, other=0.0)
        comb = tl.load(comb_ptr + (token * S + i) * S + new, mask=real, other=0.0)
        total = total + comb[:, None] * old.to(tl.float32)[None, :]
    at = (token * S + new)[:, None] * H + column[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, total.to(dtype), mask=real[:, None] & live[None, :])
