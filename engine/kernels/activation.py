"""Gated activation of the MLP (Shazeer, 2020): silu(gate) * up, gate and up side by side.

silu(x) = x / (1 + exp(-x)) in float32, rounded before the product. Moves 3 * I values a token.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Combine the halves of the last dimension.

    Args:
        gate_up: [T, 2I]: gate, then up.

    Returns:
        [T, I] in gate_up's dtype.
    """
    Dims().check("gate_up", gate_up, "T _")
    impl = silu_mul_triton if gate_up.is_cuda else silu_mul_ref
    return impl(gate_up)


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in torch: the definition a kernel is held to."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` as one launch."""
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, block))](
        out, gate_up, gate_up.stride(0), I=width, BLOCK=block, **dependent(gate_up)
    )
    return out


@triton.jit
def _silu_mul_kernel(
    out_ptr,  # [T, I], out
    gate_up_ptr,  # [T, 2I]
    gate_up_stride,
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < I
    at = gate_up_ptr + token * gate_up_stride + column
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * I + column, gate_times_up(gate, up, dtype), mask=live)


@triton.jit
def gate_times_up(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in `dtype`, of float32 blocks whose values `dtype` has."""
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (gate * up).to(dtype)
