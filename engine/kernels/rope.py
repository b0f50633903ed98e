"""Rotary position embedding (Su et al., 2021), half-split pairs.

    [a, b] -> [a cos - b sin, b cos + a sin],   angle = position / theta^(2i/D)

a and b are the two halves of a head. llama3 scaling stretches low frequencies only.
`qk_norm_rope` puts Qwen3's norms of q and k heads before it. Moves 2 * x bytes either way.
"""

import math

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.norms import rms_norm_ref


def inverse_frequencies(
    head_dim: int,
    theta: float,
    *,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position: int = 8192,
) -> torch.Tensor:
    """[D/2] float64 angles per position.

    Args:
        head_dim: D.
        theta: Base.
        kind: `default`, `linear` (all frequencies divided by `factor`) or `llama3`.
        factor: Stretch of the scaled frequencies.
        low_freq_factor: llama3: wavelengths above original_max_position / this are stretched.
        high_freq_factor: llama3: wavelengths below original_max_position / this are kept.
        original_max_position: llama3: context length before stretching.
    """
    inv = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "linear":
        return inv / factor
    if kind == "llama3":
        turns = original_max_position * inv / (2 * math.pi)
        smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * inv / factor + smooth * inv
    return inv


def rope_table(inv: torch.Tensor, num_positions: int) -> torch.Tensor:
    """[num_positions, 2, D/2] float32: cosines and sines of every position."""
    # angles in float32 products of float32 factors, as the checkpoints were trained
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv.float()
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def rope(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads.

    Args:
        x: [T, N, D] heads of any kind; strides of T and N are free.
        cos_sin: [T, 2, D/2] float32, rows of `rope_table` at each token's position.

    Returns:
        [T, N, D] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T N _")
    dims.check("cos_sin", cos_sin, "T 2 _", torch.float32)
    impl = rope_triton if x.is_cuda else rope_ref
    return impl(x, cos_sin)


def rope_ref(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """`rope` in torch: the definition a kernel is held to."""
    cos, sin = cos_sin[:, 0, None], cos_sin[:, 1, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rope_triton(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """`rope` as one launch."""
    return qk_norm_rope_triton(x, None, None, 0, 0.0, cos_sin)


def qk_norm_rope(
    qk: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    num_q_heads: int,
    eps: float,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Normalise each head, then rotate it.

    Args:
        qk: [T, N, D]: num_q_heads query heads, then key heads; strides of T and N are free.
        q_weight: [D] RMS norm of query heads, or None for no norm.
        k_weight: [D] RMS norm of key heads, or None.
        num_q_heads: In [0, N].
        eps: Of both norms.
        cos_sin: [T, 2, D/2] float32, rows of `rope_table` at each token's position.

    Returns:
        [T, N, D] in qk's dtype.
    """
    dims = Dims()
    dims.check("qk", qk, "T N D")
    dims.check("cos_sin", cos_sin, "T 2 _", torch.float32)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            dims.check(name, weight, "D", qk.dtype)
    impl = qk_norm_rope_triton if qk.is_cuda else qk_norm_rope_ref
    return impl(qk, q_weight, k_weight, num_q_heads, eps, cos_sin)


def qk_norm_rope_ref(
    qk: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    num_q_heads: int,
    eps: float,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """`qk_norm_rope` in torch: the definition a kernel is held to."""
    q, k = qk[:, :num_q_heads], qk[:, num_q_heads:]
    if q_weight is None and k_weight is None:
        return rope_ref(qk, cos_sin)
    q = q if q_weight is None else rms_norm_ref(q, q_weight, eps)
    k = k if k_weight is None else rms_norm_ref(k, k_weight, eps)
    return rope_ref(torch.cat((q, k), dim=1), cos_sin)


def qk_norm_rope_triton(
    qk: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    num_q_heads: int,
    eps: float,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """`qk_norm_rope` as one launch: a program per token and group of heads."""
    if qk.stride(-1) != 1:
        qk = qk.contiguous()
    num_tokens, num_heads, head_dim = qk.shape
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1, 1024 // half))
    _qk_norm_rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        out,
        qk,
        qk.stride(0),
        qk.stride(1),
        out if q_weight is None else q_weight,
        out if k_weight is None else k_weight,
        num_q_heads,
        eps,
        cos_sin.contiguous(),
        N=num_heads,
        HALF=head_dim // 2,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HEADS=heads,
        BLOCK=half,
    )
    return out


@triton.jit(do_not_specialize=["num_q_heads"])
def _qk_norm_rope_kernel(
    out_ptr,  # [T, N, 2*HALF], out
    qk_ptr,  # [T, N, 2*HALF]
    qk_token,
    qk_head,
    q_weight_ptr,  # [2*HALF]; Q_NORM only
    k_weight_ptr,  # [2*HALF]; K_NORM only
    num_q_heads,
    eps,
    cos_sin_ptr,  # [T, 2, HALF] float32
    N: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HALF
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    live = (head < N)[:, None] & inside[None, :]
    at = qk_ptr + token * qk_token + head[:, None] * qk_head + column[None, :]
    a = tl.load(at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=live, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if Q_NORM or K_NORM:
        is_q = (head < num_q_heads)[:, None]
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
        normed_a = (a * scale[:, None]).to(dtype).to(tl.float32)
        normed_b = (b * scale[:, None]).to(dtype).to(tl.float32)
        if Q_NORM:
            low = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(q_weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
            a = tl.where(is_q, (normed_a * low[None, :]).to(dtype).to(tl.float32), a)
            b = tl.where(is_q, (normed_b * high[None, :]).to(dtype).to(tl.float32), b)
        if K_NORM:
            low = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(k_weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
            a = tl.where(is_q, a, (normed_a * low[None, :]).to(dtype).to(tl.float32))
            b = tl.where(is_q, b, (normed_b * high[None, :]).to(dtype).to(tl.float32))
    angle = cos_sin_ptr + token * 2 * HALF + column
    cos = tl.load(angle, mask=inside, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=inside, other=0.0)[None, :]
    to = out_ptr + (token * N + head[:, None]) * 2 * HALF + column[None, :]
    tl.store(to, (a * cos - b * sin).to(dtype), mask=live)
    tl.store(to + HALF, (b * cos + a * sin).to(dtype), mask=live)
