"""A ragged batch dealt to the ranks that hold its requests' state: row n is rank n % N's.

Unlike batch positions (`engine.kernels.deal_rows`), rows stay with their requests, so that an owner
may have any number of a batch's requests, or none. Every owner has room for c requests and T'
tokens, as the host says; in owner-major order rank 0's tokens come first, then rank 1's, ...

    token[o T' + i] = the i-th token of rank o's requests, in their order; 0 in room left over
    place[t]        = where token t lies in owner-major order; 0 for padding

R requests, T tokens, N ranks. One launch, and no host reads; moves 16 bytes a token.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_STRETCH = 64
"""Tokens of each request that one program deals: a round's requests have fewer."""


class OwnTokens(NamedTuple):
    """Who holds which tokens, and what this rank holds."""

    token: torch.Tensor  # [N, T'] int64
    place: torch.Tensor  # [T] int64
    request: torch.Tensor  # [c] int64, this rank's requests; -1 in room left over
    cu_seqlens: torch.Tensor  # [c+1] int32, where they begin among its own tokens


def own_tokens(
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    *,
    rank: int,
    size: int,
    spare: int,
    most_requests: int,
    most_tokens: int,
) -> OwnTokens:
    """Deal tokens to the owners of their requests.

    Args:
        rows: [R] int64.
        cu_seqlens: [R+1] int32, where each request's tokens begin.
        num_tokens: T, padding behind the last request included.
        rank: This rank.
        size: N.
        spare: The row of padding, which is nobody's and has no tokens.
        most_requests: c; no rank has more.
        most_tokens: T'; no rank has more.
    """
    dims = Dims()
    dims.check("rows", rows, "R", torch.int64)
    dims.check("cu_seqlens", cu_seqlens, "R+1", torch.int32)
    impl = own_tokens_triton if rows.is_cuda else own_tokens_ref
    return impl(
        rows,
        cu_seqlens,
        num_tokens,
        rank=rank,
        size=size,
        spare=spare,
        most_requests=most_requests,
        most_tokens=most_tokens,
    )


def own_tokens_ref(
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    *,
    rank: int,
    size: int,
    spare: int,
    most_requests: int,
    most_tokens: int,
) -> OwnTokens:
    """`own_tokens` in torch: the definition the kernel is held to."""
    device, count = rows.device, len(rows)
    cu = cu_seqlens.long()
    lens = cu[1:] - cu[:-1]
    owner = torch.where(rows == spare, size, rows % size)
    ranks = torch.arange(size, device=device)
    theirs = (owner[:, None] == ranks).long()
    # of each request: how many of its owner's, and how many of their tokens, come before it
    before = theirs.cumsum(0) - theirs
    begins = (theirs * lens[:, None]).cumsum(0) - theirs * lens[:, None]
    held = owner.clamp(max=size - 1)[:, None]
    seat, begin = before.gather(1, held)[:, 0], begins.gather(1, held)[:, 0]

    index = torch.arange(num_tokens, device=device)
    request = torch.searchsorted(cu[1:].contiguous(), index, right=True).clamp(max=count - 1)
    live = (index < cu[-1]) & (owner[request] < size)
    found = owner[request] * most_tokens + begin[request] + index - cu[request]
    # one more place, for what is nobody's: elsewhere no two tokens meet
    none = size * most_tokens
    token = torch.zeros(none + 1, dtype=torch.int64, device=device)
    token.scatter_(0, torch.where(live, found, none), index)
    mine = torch.full((most_requests + 1,), -1, dtype=torch.int64, device=device)
    mine.scatter_(
        0, torch.where(owner == rank, seat, most_requests), torch.arange(count, device=device)
    )
    mine = mine[:most_requests]
    own_lens = torch.where(mine < 0, 0, lens[mine.clamp(min=0)])
    return OwnTokens(
        token[:none].view(size, most_tokens),
        torch.where(live, found, 0),
        mine,
        torch.nn.functional.pad(own_lens.cumsum(0), (1, 0)).int(),
    )


def own_tokens_triton(
    rows: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    *,
    rank: int,
    size: int,
    spare: int,
    most_requests: int,
    most_tokens: int,
) -> OwnTokens:
    """`own_tokens` as one launch: programs by rank, and by stretch of each request's tokens."""
    device = rows.device
    token = torch.empty((size, most_tokens), dtype=torch.int64, device=device)
    place = torch.empty(num_tokens, dtype=torch.int64, device=device)
    request = torch.empty(most_requests, dtype=torch.int64, device=device)
    owned = torch.empty(most_requests + 1, dtype=torch.int32, device=device)
    _own_tokens_kernel[(size, triton.cdiv(max(most_tokens, 1), _STRETCH))](
        token,
        place,
        request,
        owned,
        rows,
        cu_seqlens,
        len(rows),
        num_tokens,
        rank,
        spare,
        most_requests,
        most_tokens,
        C=triton.next_power_of_2(max(len(rows), most_requests)),
        STRETCH=_STRETCH,
        BLOCK=256,
        **dependent(token),
    )
    return OwnTokens(token, place, request, owned)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "rank", "spare", "most_requests", "most_tokens"]
)
def _own_tokens_kernel(
    token_ptr,  # [N, T'] int64, out
    place_ptr,  # [T] int64, out
    request_ptr,  # [c] int64, out
    owned_ptr,  # [c+1] int32, out
    rows_ptr,  # [R] int64
    cu_seqlens_ptr,  # [R+1] int32
    num_reqs,  # R
    num_tokens,  # T
    rank,
    spare,
    most_requests,  # c
    most_tokens,  # T'
    C: tl.constexpr,  # >= R, c
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    owner, size = tl.program_id(0), tl.num_programs(0)
    part, parts = tl.program_id(1), tl.num_programs(1)
    r = tl.arange(0, C)
    row = tl.load(rows_ptr + r, mask=r < num_reqs, other=0)
    theirs = (r < num_reqs) & (row != spare) & (row % size == owner)
    first = tl.load(cu_seqlens_ptr + r, mask=theirs, other=0)
    lens = tl.load(cu_seqlens_ptr + r + 1, mask=theirs, other=0) - first
    ends = tl.cumsum(lens, 0)
    begins = ends - lens
    total, held = tl.sum(lens, 0), tl.sum(theirs.to(tl.int32), 0)
    start = owner.to(tl.int64) * most_tokens
    out_ptr = token_ptr + start
    for k in range(part * STRETCH, min((part + 1) * STRETCH, tl.max(lens, 0))):
        there = theirs & (k < lens)
        tl.store(out_ptr + begins + k, (first + k).to(tl.int64), mask=there)
        tl.store(place_ptr + first + k, start + begins + k, mask=there)
    for i in range(total + part * BLOCK, most_tokens, parts * BLOCK):
        index = i + tl.arange(0, BLOCK)
        tl.store(out_ptr + index, tl.zeros([BLOCK], tl.int64), mask=index < most_tokens)
    if part == 0:
        if owner == 0:
            last = tl.load(cu_seqlens_ptr + num_reqs)
            for i in range(last, num_tokens, BLOCK):
                index = i + tl.arange(0, BLOCK)
                tl.store(place_ptr + index, tl.zeros([BLOCK], tl.int64), mask=index < num_tokens)
        if owner == rank:
            seat = tl.cumsum(theirs.to(tl.int32), 0) - 1
            tl.store(request_ptr + seat, r.to(tl.int64), mask=theirs)
            tl.store(owned_ptr + 1 + seat, ends, mask=theirs)
            left_over = (r >= held) & (r < most_requests)
            tl.store(request_ptr + r, tl.full([C], -1, tl.int64), mask=left_over)
            tl.store(owned_ptr + 1 + r, tl.full([C], 0, tl.int32) + total, mask=left_over)
            tl.store(owned_ptr, 0)
