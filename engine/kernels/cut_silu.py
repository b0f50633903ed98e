"""Gated activation of an expert (DeepSeek-V4): silu(min(gate, c)) * clip(up, -c, c).

silu(x) = x / (1 + exp(-x)), all in float32, rounded once. Moves 3 * I values a row.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_BLOCK = 1024


def cut_silu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """Combine the halves of the last dimension.

    Args:
        gate_up: [T, 2I]: gate, then up.
        limit: c.

    Returns:
        [T, I] in gate_up's dtype.
    """
    Dims().check("gate_up", gate_up, "T _")
    impl = cut_silu_triton if gate_up.is_cuda else cut_silu_ref
    return impl(gate_up, limit)


def cut_silu_ref(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`cut_silu` in torch: the definition a kernel is held to."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def cut_silu_triton(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """`cut_silu` as one launch."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _cut_silu_kernel[(num_rows, triton.cdiv(width, block))](
            out, gate_up, limit, I=width, BLOCK=block, **dependent(gate_up)
        )
    return out


@triton.jit
def _cut_silu_kernel(
    out_ptr,  # [T, I], out
    gate_up_ptr,  # [T, 2I]
    limit,
    I: tl.constexpr,  # noqa: E741
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < I
    at = gate_up_ptr + row * 2 * I + column
    gate = tl.load(at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=live, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * I + column, out.to(out_ptr.dtype.element_ty), mask=live)
