"""The end of a round in one launch: rows move on, and rejected drafts leave no draft context.

    n = num_committed, or 0 where a deciding logit is not finite or the member is padding
    num_computed[index] = starts + n;   anchor[index] = the last committed token
    kept slot of a member's i-th token = its slot for i < n, else PAD_SLOT

The hidden state of a rejected draft belongs to a token that is not there. Moves 16 bytes a token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.acceptance import Acceptance
from engine.kernels.contract import PAD_SLOT, Dims
from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.layout import Layout


class Committed(NamedTuple):
    """What a round leaves."""

    result: torch.Tensor  # [R, 2+W (+G)] int64: n, tokens verified, the tokens, -1 after them, and
    # survivals as the bits they are: all that the host wants to know, in one copy
    slots: torch.Tensor  # [T] int64, PAD_SLOT for rejected drafts and padding


def commit(
    accepted: Acceptance,
    cu_seqlens_q: torch.Tensor,
    slots: torch.Tensor,
    index: torch.Tensor,
    at: Layout,
    anchor: torch.Tensor,
    num_computed: torch.Tensor,
    survival: torch.Tensor | None = None,
) -> Committed:
    """Move rows on.

    Args:
        accepted: What R members keep; at most W tokens each.
        cu_seqlens_q: [R+1] int32, tokens verified.
        slots: [T] int64, where each has its KV.
        index: [R] int64, rows; those of live members are distinct.
        at: Where the members were.
        anchor: [N] int64, changed in place.
        num_computed: [N] int64, changed in place.
        survival: [R, G] float32 of the drafts, for the result.
    """
    dims = Dims()
    dims.check("token_ids", accepted.token_ids, "R W", torch.int64)
    dims.check("num_committed", accepted.num_committed, "R", torch.int64)
    dims.check("finite", accepted.finite, "R", torch.bool)
    dims.check("cu_seqlens_q", cu_seqlens_q, "R+1", torch.int32)
    dims.check("slots", slots, "T", torch.int64)
    dims.check("index", index, "R", torch.int64)
    dims.check("anchor", anchor, "N", torch.int64)
    dims.check("num_computed", num_computed, "N", torch.int64)
    if survival is not None:
        dims.check("survival", survival, "R G", torch.float32)
    impl = commit_triton if slots.is_cuda else commit_ref
    return impl(accepted, cu_seqlens_q, slots, index, at, anchor, num_computed, survival)


def commit_ref(
    accepted: Acceptance,
    cu_seqlens_q: torch.Tensor,
    slots: torch.Tensor,
    index: torch.Tensor,
    at: Layout,
    anchor: torch.Tensor,
    num_computed: torch.Tensor,
    survival: torch.Tensor | None,
) -> Committed:
    """`commit` in torch: the definition a kernel is held to."""
    counts = torch.where(accepted.finite & (at.lens > 0), accepted.num_committed, 0)
    last = accepted.token_ids.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    num_computed[index] = at.starts + counts
    anchor[index] = torch.where(counts > 0, last, at.anchors)
    token = torch.arange(len(slots), device=slots.device)
    request = torch.searchsorted(cu_seqlens_q[1:].long(), token, right=True)
    request = request.clamp(max=len(counts) - 1)
    kept = (token - cu_seqlens_q[request] < counts[request]) & (token < cu_seqlens_q[-1])
    parts = [counts[:, None], cu_seqlens_q.diff()[:, None].long(), accepted.token_ids]
    if survival is not None:
        parts.append(survival.contiguous().view(torch.int32).long())
    return Committed(
        torch.cat(parts, dim=1),
        torch.where(kept, slots, PAD_SLOT),
    )


def commit_triton(
    accepted: Acceptance,
    cu_seqlens_q: torch.Tensor,
    slots: torch.Tensor,
    index: torch.Tensor,
    at: Layout,
    anchor: torch.Tensor,
    num_computed: torch.Tensor,
    survival: torch.Tensor | None,
) -> Committed:
    """`commit` as one launch: a program per member, and one more for the padding's slots."""
    num_reqs, width = accepted.token_ids.shape
    gamma = 0 if survival is None else survival.shape[1]
    result = torch.empty((num_reqs, 2 + width + gamma), dtype=torch.int64, device=slots.device)
    kept = torch.empty_like(slots)
    _commit_kernel[(num_reqs + 1,)](
        result,
        kept,
        anchor,
        num_computed,
        accepted.token_ids.contiguous(),
        accepted.num_committed,
        accepted.finite,
        cu_seqlens_q,
        slots,
        index,
        at.anchors,
        at.starts,
        at.lens,
        at.lens if survival is None else survival.contiguous(),
        num_reqs,
        len(slots),
        W=width,
        G=gamma,
        PAD=PAD_SLOT,
        BLOCK=triton.next_power_of_2(max(width, gamma)),
        BLOCK_PAD=256,
        **dependent(slots),
    )
    return Committed(result, kept)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _commit_kernel(
    result_ptr,  # [R, 2+W+G] int64, out
    kept_ptr,  # [T] int64, out
    anchor_ptr,  # [N] int64, in place
    num_computed_ptr,  # [N] int64, in place
    token_ids_ptr,  # [R, W] int64
    num_committed_ptr,  # [R] int64
    finite_ptr,  # [R] bool
    cu_ptr,  # [R+1] int32
    slots_ptr,  # [T] int64
    index_ptr,  # [R] int64
    anchors_ptr,  # [R] int64
    starts_ptr,  # [R] int64
    lens_ptr,  # [R] int32
    survival_ptr,  # [R, G] float32; not read where G is 0
    num_reqs,  # R
    num_tokens,  # T
    W: tl.constexpr,
    G: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # >= W and G
    BLOCK_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    member = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_ptr + member)
    if member == num_reqs:
        for i in range(begin, num_tokens, BLOCK_PAD):
            token = i + tl.arange(0, BLOCK_PAD)
            tl.store(kept_ptr + token, PAD, mask=token < num_tokens)
        return
    end = tl.load(cu_ptr + member + 1)
    row = tl.load(index_ptr + member)
    start = tl.load(starts_ptr + member)
    live = (tl.load(lens_ptr + member) > 0) & (tl.load(finite_ptr + member) != 0)
    count = tl.where(live, tl.load(num_committed_ptr + member), 0)
    lane = tl.arange(0, BLOCK)
    ids = tl.load(token_ids_ptr + member * W + lane, mask=lane < W, other=-1)
    into = result_ptr + member * (2 + W + G)
    tl.store(into, count)
    tl.store(into + 1, (end - begin).to(tl.int64))
    tl.store(into + 2 + lane, ids, mask=lane < W)
    if G > 0:
        survival = tl.load(survival_ptr + member * G + lane, mask=lane < G, other=0.0)
        bits = survival.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(into + 2 + W + lane, bits, mask=lane < G)
    last = tl.sum(tl.where(lane == count - 1, ids, 0), 0)
    last = tl.where(count > 0, last, tl.load(anchors_ptr + member))
    tl.store(anchor_ptr + row, last)
    tl.store(num_computed_ptr + row, start + count)
    for i in range(begin, end, BLOCK):
        token = i + lane
        slot = tl.load(slots_ptr + token, mask=token < end, other=PAD)
        tl.store(kept_ptr + token, tl.where(token - begin < count, slot, PAD), mask=token < end)
