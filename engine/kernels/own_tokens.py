"""A ragged batch dealt to the ranks that hold its requests' state: row n is rank n % N's.

Unlike batch positions (`engine.kernels.deal_rows`), rows stay with their requests, so that an owner
may have any number of a batch's requests, or none. Every owner has room for c requests and T'
tokens, as the host says; in owner-major order rank 0's tokens come first, then rank 1's, ...

    token[o T' + i] = the i-th token of rank o's requests, in their order; 0 in room left over
    place[t]        = where token t lies in owner-major order; 0 for padding

R requests, T tokens, N ranks. A dozen small launches, and no host reads; moves some 16 bytes a
token.
"""

from typing import NamedTuple

import torch

from engine.kernels.contract import Dims


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
        spare: The row of padding, which is nobody's.
        most_requests: c; no rank has more.
        most_tokens: T'; no rank has more.
    """
    dims = Dims()
    dims.check("rows", rows, "R", torch.int64)
    dims.check("cu_seqlens", cu_seqlens, "R+1", torch.int32)
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
