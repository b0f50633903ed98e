"""Host lists to the tensors of one forward."""

from collections.abc import Sequence as Items

import torch

from engine.kernels.paged_attention import AttentionBatch, locate_kv
from engine.kernels.slot_mapping import slot_mapping
from engine.sequence import Sequence


def attention_batch(
    sequences: Items[Sequence],
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    query_lens: Items[int],
    kv_lens: Items[int],
    kv_block_size: int,
) -> AttentionBatch:
    """Describe who attends to what.

    Args:
        sequences: R requests in batch order.
        block_table: [R, M] int32.
        cu_seqlens_q: [R+1] int32.
        query_lens: Queries per request.
        kv_lens: KV tokens per request, its queries included.
        kv_block_size: S.
    """
    device = block_table.device
    return AttentionBatch(
        block_table=block_table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        kv_block_size=kv_block_size,
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        kv_index=tuple(
            locate_kv(s.block_ids, n, kv_block_size, device)
            for s, n in zip(sequences, kv_lens, strict=True)
        ),
    )


def slots_of(batch: AttentionBatch, positions: torch.Tensor) -> torch.Tensor:
    """[T] int64 KV slots of a batch's tokens."""
    return slot_mapping(batch.block_table, positions, batch.cu_seqlens_q, batch.kv_block_size)
