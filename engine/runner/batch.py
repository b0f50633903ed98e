"""Who is in a step, and where their KV lies."""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from engine.kernels.own_tokens import own_tokens
from engine.kernels.paged_attention import AttentionBatch, OwnPart, locate_kv
from engine.kernels.verify_plan import VerifyLens, verify_lens
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Members:
    """Who is in a step. R requests, after padding to a graph tier."""

    index: torch.Tensor  # [R] int64, their rows; padding points to the spare row
    sequences: Items[Sequence]  # without padding; read only for attention's CPU reference
    most_owned: int = 0
    """No rank holds more of them; 0 where ranks do not hold requests."""


class Needs(NamedTuple):
    """What a captured step has to be able to do."""

    speculating: bool
    """Is draft context kept?"""

    sampled: bool
    filtered: bool
    crowd: int = 0
    """Where ranks hold requests: as many at most of one rank, if an even share is too few."""


@dataclass(frozen=True, slots=True)
class Seats:
    """Who holds the state of which rows: row n is rank n % N's, as its row n // N."""

    rank: int
    size: int
    spare: int
    """The row of padding, which is nobody's."""

    def local(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's own numbers of rows; of the spare one, its spare one."""
        # row counts are rounded up on every rank, as the state's are
        return torch.where(rows == self.spare, -(-self.spare // self.size), rows // self.size)

    def within(
        self,
        planned: VerifyLens,
        survival: torch.Tensor,
        starts: torch.Tensor,
        rows: torch.Tensor,
        room: int,
    ) -> VerifyLens:
        """Of what a round verifies, as much as each rank has room for: its best drafts.

        Whether a draft is verified still depends on nothing drafted with it or after it.

        Args:
            planned: Of the R requests.
            survival: [R, G] float32.
            starts: [R] int64, the anchors' positions.
            rows: [R] int64.
            room: T', tokens of a rank; no rank has more requests.
        """
        lens = torch.zeros_like(planned.lens)
        for rank in range(self.size):
            theirs = (planned.lens > 0) & (rows % self.size == rank)
            drafts = (room - theirs.sum()).view(1)
            lens += verify_lens(survival, starts, theirs, drafts).lens
        lens = torch.minimum(lens, planned.lens)
        return VerifyLens(lens, torch.where(lens > 0, starts + lens, 0).int())


_MORE_THAN_ITS_SHARE = 1.25
"""Drafts that a rank may verify, in even shares: what its requests have may be the better ones."""


def own_room(num_reqs: int, num_tokens: int, width: int, most_owned: int) -> int:
    """T', tokens that a rank has room for in a round; never fewer than its requests.

    Args:
        num_reqs: R, slots.
        num_tokens: T >= R.
        width: Tokens of a request at most.
        most_owned: Requests of a rank at most.
    """
    whole = min(num_tokens, most_owned * width)
    drafts = (num_tokens - num_reqs) * most_owned / num_reqs
    return min(whole, most_owned + math.ceil(drafts * _MORE_THAN_ITS_SHARE))


def attention_batch(
    members: Members,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    kv_block_size: int,
) -> AttentionBatch:
    """Describe who attends to what.

    Args:
        members: R requests.
        block_table: [R, M] int32.
        cu_seqlens_q: [R+1] int32.
        seq_lens: [R] int32, KV tokens per request, its queries included; 0 for padding.
        max_query_len: Most queries of one request.
        kv_block_size: S.
    """
    # bounds are enough for the kernels; the reference takes lengths from the host
    query_lens, kv_lens = [max_query_len], [block_table.shape[1] * kv_block_size]
    kv_index: list[slice | torch.Tensor] = []
    if not block_table.is_cuda:
        count = len(members.sequences)
        query_lens, kv_lens = cu_seqlens_q.diff().tolist()[:count], seq_lens.tolist()[:count]
        kv_index = [
            locate_kv(s.block_ids, n, kv_block_size, block_table.device)
            for s, n in zip(members.sequences, kv_lens, strict=True)
        ]
    return AttentionBatch(
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        kv_block_size=kv_block_size,
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        kv_index=tuple(kv_index),
        rows=members.index,
    )


def dealt(
    batch: AttentionBatch, members: Members, seats: Seats, num_tokens: int, most_tokens: int
) -> AttentionBatch:
    """Say what this rank holds of a step.

    Args:
        batch: As all ranks have it.
        members: R requests.
        seats: Who holds which rows.
        num_tokens: T, padding included.
        most_tokens: T', no rank's requests have more of them.
    """
    own = own_tokens(
        members.index,
        batch.cu_seqlens_q,
        num_tokens,
        rank=seats.rank,
        size=seats.size,
        spare=seats.spare,
        most_requests=members.most_owned,
        most_tokens=most_tokens,
    )
    request, real = own.request.clamp(min=0), own.request >= 0
    rows = torch.where(real, members.index[request], seats.spare)
    query_lens, kv_lens, kv_index = batch.query_lens, batch.kv_lens, batch.kv_index
    if not rows.is_cuda:
        held = members.index.tolist()[: len(query_lens)]
        mine = [i for i, row in enumerate(held) if row % seats.size == seats.rank]
        query_lens, kv_lens = tuple(query_lens[i] for i in mine), tuple(kv_lens[i] for i in mine)
        kv_index = tuple(kv_index[i] for i in mine)
    here = replace(
        batch,
        block_table=batch.block_table[request],
        cu_seqlens_q=own.cu_seqlens,
        seq_lens=torch.where(real, batch.seq_lens[request], 0),
        query_lens=query_lens,
        kv_lens=kv_lens,
        kv_index=kv_index,
        rows=seats.local(rows),
    )
    return replace(batch, own=OwnPart(seats.rank, own.token, own.place, here))
