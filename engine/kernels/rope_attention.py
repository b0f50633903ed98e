"""Attention of a step with few queries a request, straight from the product of q, k and v.

It is `rope_store` and then `paged_attention`; the definition is those two. A program holds all
queries of a request that share a KV head, so it can norm and rotate them itself, and takes the new
keys and values from registers, on their way to the cache. A layer of a small batch takes some 20 us
beside its products, and every launch saved is 2 to 3 of them.

Where programs are too few to fill the device the two ops are better: they share the keys out. To
let the last program to finish join the shares here was slower than their second launch (H200, one
request: a round 6.24 ms, two ops 6.14), and so were shares here with a second launch (5.80 and
5.75). Where they wait for memory alone the saved launch is nothing beside it (between products, KV
blocks of 32, 128 to 384 keys, eight queries: 64 requests 29.8 us, two ops 32.7; 128 58.3 and 59.2;
256 108.8 and 106.1).

Reads each request's KV once, 2 * sum(seq_len) * K * D values, and 2 * T * (Q + K) * D more.
"""

import torch
import triton

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, multiprocessors
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.paged_attention_triton import LOG2_E, Tile, choose_tile
from engine.kernels.rope_attention_jit import rope_attention_kernel

_MAX_ROWS = 64
"""(query, head) pairs of a program: more are worth a pass of their own."""


def joins(num_heads: int, k_cache: torch.Tensor, batch: AttentionBatch) -> bool:
    """Is this one launch better than `rope_store` and `paged_attention`, of `num_heads` heads?"""
    return k_cache.is_cuda and fits(num_heads, k_cache, batch) and _fills(k_cache, batch)


def fits(num_heads: int, k_cache: torch.Tensor, batch: AttentionBatch) -> bool:
    """May the fused kernel take this step? Low precision, and one program a request and head."""
    kv_heads, head_dim = k_cache.shape[1:]
    half = head_dim // 2
    return (
        k_cache.dtype != torch.float32
        and half & (half - 1) == 0
        and 16 <= half <= 64
        and 0 < batch.max_query_len * (num_heads // kv_heads) <= _MAX_ROWS
    )


def _fills(k_cache: torch.Tensor, batch: AttentionBatch) -> bool:
    """Are there programs for a third of the multiprocessors, and not more than 8 for each?"""
    programs = len(batch.seq_lens) * k_cache.shape[1]
    processors = multiprocessors(k_cache.device)
    return processors <= 3 * programs and programs <= 8 * processors


def rope_attention_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, store k and v, attend; where it `fits`.

    Args:
        qkv: [T, Q + 2K, D]: query, key and value heads; Q is a multiple of K.
        q_weight: [D] RMS norm of query heads, or None for no norm.
        k_weight: [D] RMS norm of key heads, or None.
        eps: Of both norms.
        cos_sin: [T, 2, D/2] float32, rows of `rope_table` at each token's position.
        k_cache: [slots, K, D], one layer, changed in place.
        v_cache: [slots, K, D], changed in place.
        slots: [T] int64; negative slots write nothing.
        batch: Lengths and block tables; the slots are those of its last tokens.
        scale: Multiplies the scores; > 0.
        causal: Among the queries of one request.
        window: Context tokens visible before the first query; 0 = all.
        tile: Program shape; None = from the table.

    Returns:
        [T, Q, D] in qkv's dtype; padding rows are 0.
    """
    dims = Dims()
    dims.check("qkv", qkv, "T _ D")
    dims.check("k_cache", k_cache, "P K D", qkv.dtype)
    dims.check("v_cache", v_cache, "P K D", qkv.dtype)
    dims.check("cos_sin", cos_sin, "T 2 _", torch.float32)
    dims.check("slots", slots, "T", torch.int64)
    num_tokens, num_rows, head_dim = qkv.shape
    num_reqs, kv_heads = batch.block_table.shape[0], k_cache.shape[1]
    num_heads = num_rows - 2 * kv_heads
    group = num_heads // kv_heads
    if qkv.stride(-1) != 1 or k_cache.stride(-1) != 1 or k_cache.stride() != v_cache.stride():
        raise ValueError(f"strides: qkv {qkv.stride()}, caches {k_cache.stride()}")
    shape = (num_tokens, num_heads, head_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0 or num_reqs == 0 or batch.max_query_len == 0:
        return out.zero_()
    tile = tile or choose_tile(qkv, batch.max_query_len * group, num_reqs * kv_heads)
    block_m = max(tile.block_m, triton.next_power_of_2(batch.max_query_len * group))
    rope_attention_kernel[(kv_heads, num_reqs)](
        out,
        qkv,
        qkv.stride(0),
        qkv.stride(1),
        out if q_weight is None else q_weight,
        out if k_weight is None else k_weight,
        eps,
        cos_sin.contiguous(),
        slots,
        k_cache,
        v_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        batch.block_table,
        batch.block_table.stride(0),
        batch.cu_seqlens_q,
        batch.seq_lens,
        num_reqs,
        num_tokens,
        scale * LOG2_E,
        window,
        GROUP=group,
        HALF=head_dim // 2,
        S=batch.kv_block_size,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        CAUSAL=causal,
        WINDOW=window > 0,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_NEW=max(16, triton.next_power_of_2(batch.max_query_len)),
        **dependent(qkv),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
