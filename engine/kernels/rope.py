"""Rotary position embedding (Su et al., 2021), half-split pairs.

    [a, b] -> [a cos - b sin, b cos + a sin],   angle = position / theta^(2i/D)

a and b are the two halves of a head. llama3 scaling stretches low frequencies only. The kernel that
rotates is in rope_store.py.
"""

import math

import torch


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


def rope_ref(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads.

    Args:
        x: [T, N, D] heads of any kind.
        cos_sin: [T, 2, D/2] float32, rows of `rope_table` at each token's position.

    Returns:
        [T, N, D] in x's dtype.
    """
    cos, sin = cos_sin[:, 0, None], cos_sin[:, 1, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
