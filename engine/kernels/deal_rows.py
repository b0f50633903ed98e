"""Rows of a ragged batch, dealt to the owners of their requests, in one launch.

Batch position i belongs to rank i % N, as its i // N-th request. A rank has room for T' rows:

    token[o T' + r] = the r-th row of rank o's requests, in their order; 0 in room that is left over
    cu_owned[j]     = where this rank's j-th request begins among its rows

R requests, N ranks, c = ceil(R/N) requests a rank. Moves 8 bytes a row.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs


def deal_rows(
    cu_seqlens: torch.Tensor, rank: int, size: int, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Deal rows to owners.

    Args:
        cu_seqlens: [R+1] int32, where each request's rows begin.
        rank: This rank.
        size: N.
        room: T', rows a rank has room for; none has more.

    Returns:
        token [N * T'] int64, and cu_owned [c+1] int32.
    """
    Dims().check("cu_seqlens", cu_seqlens, "R+1", torch.int32)
    impl = deal_rows_triton if cu_seqlens.is_cuda else deal_rows_ref
    return impl(cu_seqlens, rank, size, room)


def deal_rows_ref(
    cu_seqlens: torch.Tensor, rank: int, size: int, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`deal_rows` in torch: the definition the kernel is held to."""
    num_reqs, device = len(cu_seqlens) - 1, cu_seqlens.device
    capacity = -(-num_reqs // size)
    # [N, c]: batch positions, past the end for a rank's room that is left over
    place = torch.arange(capacity * size, device=device).view(capacity, size).t()
    inside = place.clamp(max=num_reqs - 1)
    lens = torch.where(place < num_reqs, cu_seqlens.diff().long()[inside], 0)
    ends = lens.cumsum(1)
    row = torch.arange(room, device=device).expand(size, -1).contiguous()
    request = torch.searchsorted(ends, row, right=True).clamp(max=capacity - 1)
    first = cu_seqlens.long()[inside] - (ends - lens)
    token = torch.where(row < ends[:, -1:], first.gather(1, request) + row, 0)
    return token.flatten(), torch.nn.functional.pad(ends[rank], (1, 0)).int()


def deal_rows_triton(
    cu_seqlens: torch.Tensor, rank: int, size: int, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`deal_rows` as one launch: a program per rank."""
    num_reqs = len(cu_seqlens) - 1
    capacity = -(-num_reqs // size)
    token = torch.empty(size * room, dtype=torch.int64, device=cu_seqlens.device)
    owned = torch.empty(capacity + 1, dtype=torch.int32, device=cu_seqlens.device)
    _deal_rows_kernel[(size,)](
        token,
        owned,
        cu_seqlens,
        num_reqs,
        rank,
        size,
        room,
        capacity,
        C=triton.next_power_of_2(capacity),
        BLOCK=256,
        **dependent(token),
    )
    return token, owned


@triton.jit
def _deal_rows_kernel(
    token_ptr,  # [N * T'] int64, out
    owned_ptr,  # [c+1] int32, out
    cu_seqlens_ptr,  # [R+1] int32
    num_reqs,  # R
    rank,
    size,  # N
    room,  # T'
    capacity,  # c
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    owner = tl.program_id(0)
    j = tl.arange(0, C)
    request = j * size + owner
    real = (j < capacity) & (request < num_reqs)
    first = tl.load(cu_seqlens_ptr + request, mask=real, other=0)
    lens = tl.load(cu_seqlens_ptr + request + 1, mask=real, other=0) - first
    ends = tl.cumsum(lens, 0)
    begins = ends - lens
    total = tl.sum(lens, 0)
    out_ptr = token_ptr + owner.to(tl.int64) * room
    for k in range(0, tl.max(lens, 0)):
        tl.store(out_ptr + begins + k, (first + k).to(tl.int64), mask=k < lens)
    for i in range(total, room, BLOCK):
        row = i + tl.arange(0, BLOCK)
        tl.store(out_ptr + row, tl.zeros([BLOCK], tl.int64), mask=row < room)
    if owner == rank:
        tl.store(owned_ptr + 1 + j, ends, mask=j < capacity)
        tl.store(owned_ptr, 0)
