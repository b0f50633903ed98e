"""Gated activation of the MLP (Shazeer, 2020): silu(gate) * up, gate and up side by side."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Combine the halves of the last dimension.

    Args:
        gate_up: [T, 2I]: gate, then up.

    Returns:
        [T, I] in gate_up's dtype.
    """
    return silu_mul_ref(gate_up)


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in torch: the definition a kernel is held to."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
