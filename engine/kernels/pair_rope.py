"""Rotary position embedding of adjacent pairs, on the last channels of a head (DeepSeek-V4).

    [a, b] -> [a cos - b sin, b cos + a sin]    for channels (2i, 2i+1) of the last 2P

The inverse turns by the negative angle. Angles are kept with ("YaRN", Peng et al., 2023) or without
slow frequencies stretched; cosines and sines are never scaled.
"""

import math

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_TILE = 2048
"""Pairs a program aims at."""


def yarn_frequencies(
    rope_dim: int,
    theta: float,
    *,
    factor: float = 1.0,
    original_max_position: int = 0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> torch.Tensor:
    """[rope_dim/2] float32 angles per position.

    Args:
        rope_dim: Channels that turn.
        theta: Base.
        factor: Stretch of the slow frequencies; 1 leaves all as they are.
        original_max_position: Context length before stretching.
        beta_fast: Frequencies that turn at least so often in it are kept.
        beta_slow: Those that turn at most so often are stretched in full.
    """
    index = torch.arange(0, rope_dim, 2, dtype=torch.float32)
    inv = 1.0 / theta ** (index / rope_dim)
    if factor == 1.0:
        return inv

    def pair_of(turns: float) -> float:
        """Which pair turns so often, as a fraction of an index."""
        length = original_max_position / (turns * 2 * math.pi)
        return rope_dim * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), rope_dim - 1)
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return inv / factor * stretched + inv * (1.0 - stretched)


def pair_rope(x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Turn heads.

    Args:
        x: [T, N, D].
        cos_sin: [T, 2, P] float32, rows of `rope_table` at each token's position; 2P <= D.
        inverse: Turn back.

    Returns:
        [T, N, D] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T N D")
    dims.check("cos_sin", cos_sin, "T 2 P", torch.float32)
    impl = pair_rope_triton if x.is_cuda else pair_rope_ref
    return impl(x, cos_sin, inverse=inverse)


def pair_rope_ref(x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """`pair_rope` in torch: the definition a kernel is held to."""
    width = 2 * cos_sin.shape[2]
    cos, sin = cos_sin[:, 0, None], cos_sin[:, 1, None]
    if inverse:
        sin = -sin
    still, turning = x[..., :-width], x[..., -width:].float()
    a, b = turning[..., ::2], turning[..., 1::2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((still, turned.to(x.dtype)), dim=-1)


def pair_rope_triton(
    x: torch.Tensor, cos_sin: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """`pair_rope` as one launch, a program for some heads of a token."""
    x, cos_sin = x.contiguous(), cos_sin.contiguous()
    num_tokens, heads, width = x.shape
    out, pairs = torch.empty_like(x), cos_sin.shape[2]
    if num_tokens:
        block = triton.next_power_of_2(width // 2)
        block_n = min(triton.next_power_of_2(heads), max(_TILE // block, 1))
        _pair_rope_kernel[(num_tokens, triton.cdiv(heads, block_n))](
            out,
            x,
            cos_sin,
            N=heads,
            D=width,
            P=pairs,
            INVERSE=inverse,
            BLOCK_N=block_n,
            BLOCK=block,
            **dependent(x),
        )
    return out


@triton.jit
def pair_turns(cos_sin_ptr, pair, D: tl.constexpr, P: tl.constexpr):
    """Cosine and sine for pairs [D/2] of a head; those before the last P do not turn."""
    turning = pair - (D // 2 - P)
    live = (turning >= 0) & (pair < D // 2)
    cos = tl.load(cos_sin_ptr + turning, mask=live, other=1.0)
    return cos, tl.load(cos_sin_ptr + P + turning, mask=live, other=0.0)


@triton.jit
def _pair_rope_kernel(
    out_ptr,  # [T, N, D], out
    x_ptr,  # [T, N, D]
    cos_sin_ptr,  # [T, 2, P]
    N: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK)
    live = (head < N)[:, None] & (pair < D // 2)[None, :]
    at = (token * N + head)[:, None] * D + 2 * pair[None, :]
    a = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + at + 1, mask=live, other=0.0).to(tl.float32)
    cos, sin = pair_turns(cos_sin_ptr + token * 2 * P, pair, D, P)
    cos, sin = cos[None, :], sin[None, :]
    if INVERSE:
        sin = -sin
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (a * cos - b * sin).to(dtype), mask=live)
    tl.store(out_ptr + at + 1, (b * cos + a * sin).to(dtype), mask=live)
