"""Token ids and positions of a step in which every request continues from its anchor.

    request r, j in [0, lens[r]):
        id = anchor if j == 0 else following[r, j-1],  position = start + j

The draft pass follows the anchor with mask tokens, verification with the drafts. Requests of
length 0 and tokens past the last request are padding: id 0, position 0.
Moves 16 bytes a token and little else.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs


class StepInputs(NamedTuple):
    """One ragged step. R requests, T tokens."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    cu_seqlens_q: torch.Tensor  # [R+1] int32


def step_inputs(
    anchors: torch.Tensor,
    following: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    num_tokens: int,
) -> StepInputs:
    """Lay out the step.

    Args:
        anchors: [R] int64.
        following: [R, F] int64, tokens after the anchor; F >= max(lens) - 1.
        starts: [R] int64, the anchor's position.
        lens: [R] int32 >= 0, tokens per request; 0 is a padding row.
        num_tokens: T >= sum(lens), known to the host.
    """
    dims = Dims()
    dims.check("anchors", anchors, "R", torch.int64)
    dims.check("following", following, "R F", torch.int64)
    dims.check("starts", starts, "R", torch.int64)
    dims.check("lens", lens, "R", torch.int32)
    impl = step_inputs_triton if lens.is_cuda else step_inputs_ref
    return impl(anchors, following, starts, lens, num_tokens)


def step_inputs_ref(
    anchors: torch.Tensor,
    following: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    num_tokens: int,
) -> StepInputs:
    """`step_inputs` in torch: the definition a kernel is held to."""
    cu = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    token = torch.arange(num_tokens, device=lens.device)
    request = torch.searchsorted(cu[1:].long(), token, right=True)
    live = request < lens.numel()
    request = torch.where(live, request, 0)
    offset = torch.where(live, token - cu[request].long(), 0)
    table = torch.cat((anchors[:, None], following), dim=1)
    return StepInputs(
        torch.where(live, table[request, offset], 0),
        torch.where(live, starts[request] + offset, 0),
        cu,
    )


def step_inputs_triton(
    anchors: torch.Tensor,
    following: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    num_tokens: int,
) -> StepInputs:
    """`step_inputs` as one launch: a program per request, and one more for the padding."""
    num_reqs, width = following.shape
    if following.stride(1) != 1:
        following = following.contiguous()
    ids = torch.empty(num_tokens, dtype=torch.int64, device=lens.device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=lens.device)
    cu = torch.empty(num_reqs + 1, dtype=torch.int32, device=lens.device)
    _step_inputs_kernel[(num_reqs + 1,)](
        ids,
        positions,
        cu,
        anchors,
        following,
        following.stride(0),
        starts,
        lens,
        num_reqs,
        num_tokens,
        width,
        BLOCK_R=triton.next_power_of_2(num_reqs + 1),
        BLOCK=triton.next_power_of_2(width + 1),
        BLOCK_PAD=256,
        **dependent(lens),
    )
    return StepInputs(ids, positions, cu)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "width", "following_stride"])
def _step_inputs_kernel(
    ids_ptr,  # [T] int64, out
    positions_ptr,  # [T] int64, out
    cu_ptr,  # [R+1] int32, out
    anchors_ptr,  # [R] int64
    following_ptr,  # [R, F] int64
    following_stride,
    starts_ptr,  # [R] int64
    lens_ptr,  # [R] int32
    num_reqs,  # R
    num_tokens,  # T
    width,  # F
    BLOCK_R: tl.constexpr,  # >= R + 1
    BLOCK: tl.constexpr,  # >= F + 1
    BLOCK_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    before = tl.arange(0, BLOCK_R)
    # every program sums the lengths before its own: no second launch, no order among programs
    begin = tl.sum(tl.load(lens_ptr + before, mask=before < row, other=0), axis=0)
    tl.store(cu_ptr + row, begin)
    if row == num_reqs:
        for i in range(begin, num_tokens, BLOCK_PAD):
            token = i + tl.arange(0, BLOCK_PAD)
            tl.store(ids_ptr + token, 0, mask=token < num_tokens)
            tl.store(positions_ptr + token, 0, mask=token < num_tokens)
        return
    offset = tl.arange(0, BLOCK)
    live = offset < tl.minimum(tl.load(lens_ptr + row), width + 1)
    at = following_ptr + row.to(tl.int64) * following_stride + offset - 1
    token_id = tl.load(at, mask=live & (offset > 0), other=0)
    token_id = tl.where(offset == 0, tl.load(anchors_ptr + row), token_id)
    tl.store(ids_ptr + begin + offset, token_id, mask=live)
    tl.store(positions_ptr + begin + offset, tl.load(starts_ptr + row) + offset, mask=live)
