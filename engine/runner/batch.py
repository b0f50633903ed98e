"""Who is in a step, and where their KV lies."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.kernels.paged_attention import AttentionBatch, locate_kv
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Members:
    """Who is in a step. R requests, after padding to a graph tier."""

    index: torch.Tensor  # [R] int64, their rows; padding points to the spare row
    sequences: Items[Sequence]  # without padding; read only for attention's CPU reference


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
