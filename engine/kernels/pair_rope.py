"""Rotary position embedding of adjacent pairs, on the last channels of a head (DeepSeek-V4).

    [a, b] -> [a cos - b sin, b cos + a sin]    for channels (2i, 2i+1) of the last 2P

The inverse turns by the negative angle. Angles are kept with ("YaRN", Peng et al., 2023) or without
slow frequencies stretched; cosines and sines are never scaled.
"""

import math

import torch

from engine.kernels.contract import Dims


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
    return pair_rope_ref(x, cos_sin, inverse=inverse)


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
