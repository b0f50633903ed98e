"""Kernels of `engine.kernels.hc_mix`: dots of all streams in fixed parts, then the coefficients.

Columns are cut into the same parts whatever the batch is, and a token's partial sums are added in
the same order: its bits depend on its streams alone.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, wait_for_inputs

if TYPE_CHECKING:
    from engine.kernels.hc_mix import MixWeights

_PARTS, _BLOCK_T, _BLOCK_K, _ROWS = 32, 32, 128, 32
"""Parts of the columns; tokens and columns of a tile; room for outputs and, as the last, x^2."""


_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""It multiplies bfloat16 by its bits."""


def mix_partials(x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """[parts, T, 32] float32 partial dots with `fn` [M, S * H]; the last column sums squares."""
    x = x.contiguous()
    num_tokens, width, outputs = len(x), x[0].numel(), fn.shape[0]
    if outputs >= _ROWS:
        raise ValueError(f"fn: {outputs} rows, at most {_ROWS - 1} are served")
    out = torch.empty((_PARTS, num_tokens, _ROWS), dtype=torch.float32, device=x.device)
    _partials_kernel[(triton.cdiv(num_tokens, _BLOCK_T), _PARTS)](
        out,
        x,
        fn,
        num_tokens,
        K=width,
        M=outputs,
        PART=triton.cdiv(triton.cdiv(width, _PARTS), _BLOCK_K) * _BLOCK_K,
        ROWS=_ROWS,
        BLOCK_T=_BLOCK_T,
        BLOCK_K=_BLOCK_K,
        **dependent(x),
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _partials_kernel(
    out_ptr,  # [PARTS, T, ROWS], out
    x_ptr,  # [T, K]
    fn_ptr,  # [M, K]
    num_tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_T, ROWS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_T], dtype=tl.float32)
    for k in tl.range(0, PART, BLOCK_K):
        column = part * PART + k + tl.arange(0, BLOCK_K)
        live = column < K
        keep = (token < num_tokens)[:, None] & live[None, :]
        x = tl.load(x_ptr + token[:, None] * K + column[None, :], mask=keep, other=0.0)
        wide = x.to(tl.float32)
        keep = (row < M)[:, None] & live[None, :]
        fn = tl.load(fn_ptr + row[:, None] * K + column[None, :], mask=keep, other=0.0)
        if x.dtype == tl.bfloat16 and not _INTERPRETED:
            # float32 is the sum of three bfloat16, whose products with x are exact
            for _ in tl.static_range(3):
                high = fn.to(tl.bfloat16)
                total = tl.dot(x, tl.trans(high), total)
                fn -= high.to(tl.float32)
        else:
            total = tl.dot(wide, tl.trans(fn), total, input_precision="ieee")
        squares += tl.sum(wide * wide, axis=1)
    total = tl.where(row[None, :] == ROWS - 1, squares[:, None], total)
    at = (part * num_tokens + token)[:, None] * ROWS + row[None, :]
    tl.store(out_ptr + at, total, mask=(token < num_tokens)[:, None])


def mix_coefficients(
    partials: torch.Tensor,
    weights: "MixWeights",
    num_streams: int,
    width: int,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    head: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pre [T, S], post [T, S] and comb [T, S, S] of partial dots; with `head`, pre alone."""
    parts, num_tokens, rows = partials.shape
    pre = partials.new_empty((num_tokens, num_streams))
    post = pre if head else torch.empty_like(pre)
    comb = pre if head else pre.new_empty((num_tokens, num_streams, num_streams))
    _coefficients_kernel[(num_tokens,)](
        pre,
        post,
        comb,
        partials,
        weights.base,
        weights.scale,
        num_tokens,
        norm_eps,
        eps,
        iterations,
        S=num_streams,
        WIDTH=width,
        HEAD=head,
        PARTS=parts,
        ROWS=rows,
        **dependent(partials),
        num_warps=1,
    )
    return pre, post, comb


@triton.jit
def _dots(partials_ptr, token, num_tokens, at, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Whole sums of the partial ones at columns `at`."""
    part = tl.arange(0, PARTS)
    row = (part * num_tokens + token) * ROWS
    return tl.sum(tl.load(partials_ptr + row[:, None] + at[None, :]), axis=0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_tokens"])
def _coefficients_kernel(
    pre_ptr,  # [T, S], out
    post_ptr,  # [T, S], out
    comb_ptr,  # [T, S, S], out
    partials_ptr,  # [PARTS, T, ROWS]
    base_ptr,  # [M]
    scale_ptr,  # [3] or [1]
    num_tokens,
    norm_eps,
    eps,
    iterations,
    S: tl.constexpr,  # a power of two
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, S)
    squares = _dots(partials_ptr, token, num_tokens, one * 0 + ROWS - 1, PARTS, ROWS)
    norm = tl.rsqrt(squares / WIDTH + norm_eps)  # [S], the same number
    m = _dots(partials_ptr, token, num_tokens, one, PARTS, ROWS) * norm
    pre = _sigmoid(m * tl.load(scale_ptr) + tl.load(base_ptr + one)) + eps
    tl.store(pre_ptr + token * S + one, pre)
    if not HEAD:
        m = _dots(partials_ptr, token, num_tokens, S + one, PARTS, ROWS) * norm
        post = 2.0 * _sigmoid(m * tl.load(scale_ptr + 1) + tl.load(base_ptr + S + one))
        tl.store(post_ptr + token * S + one, post)
        flat, at = tl.arange(0, S * S), one[:, None] * S + one[None, :]
        m = _dots(partials_ptr, token, num_tokens, 2 * S + flat, PARTS, ROWS)
        m = tl.reshape(m, (S, S)) * norm[:, None]
        m = m * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * S + at)
        m = tl.exp(m - tl.max(m, axis=1)[:, None])
        comb = m / tl.sum(m, axis=1)[:, None] + eps
        comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
        for _ in tl.range(iterations - 1):
            comb = comb / (tl.sum(comb, axis=1)[:, None] + eps)
            comb = comb / (tl.sum(comb, axis=0)[None, :] + eps)
        tl.store(comb_ptr + token * S * S + at, comb)
