"""RMS norm (Zhang and Sennrich, 2019).

    y = x / sqrt(mean(x^2) + eps) * weight

Over the last dimension, statistics in float32. Moves 2 * x bytes.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x`.

    Args:
        x: [..., H], float32, bfloat16 or float16.
        weight: [H].
        eps: Added to the mean square.

    Returns:
        [..., H] in x's dtype.
    """
    return rms_norm_ref(x, weight, eps)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in torch: the definition a kernel is held to."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
