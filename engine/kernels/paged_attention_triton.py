"""Triton kernels of `paged_attention`: the formula and its reference are in paged_attention.py.

A tile is BLOCK_M (query, head) pairs of one KV head: BLOCK_M // (Q/K) neighbouring queries, so a
group's heads read each key once. It walks the keys its queries see, BLOCK_N at a time, with a
running maximum (online softmax: Milakov and Gimelshein, 2018; tiles: Dao, FlashAttention-2, 2023).

With few queries the keys are split too (flash decoding: Dao et al., 2023). Split s of U takes the
s-th share of the keys its tile sees and writes its own output and log2-sum-exp; then

    out = sum_s 2^(lse_s - max lse) out_s / sum_s 2^(lse_s - max lse)

Few queries: reads each request's KV once, 2 * sum(seq_len) * K * D values, and 2 * T * Q * D more.
Prefill: 4 * Q * D FLOPs per visible (query, key) pair.

Lengths are read on the device and the grid comes from T, R and upper bounds, so that one captured
launch serves any lengths. Nothing but `torch.empty` allocates.
"""

from typing import NamedTuple

import torch
import triton

from engine.kernels import launch
from engine.kernels.launch import dependent
from engine.kernels.paged_attention_jit import attention_kernel, combine_kernel

LOG2_E = 1.4426950408889634
_MAX_SPLITS = 64

_LARGE_TILES = 160 << 10
"""Shared memory of a device whose programs may have tiles of 128 keys: 144 KiB at head dim 128."""


class Tile(NamedTuple):
    """Shape of one program, and how Triton builds it."""

    block_m: int  # (query, head) pairs
    block_n: int  # keys a step
    num_warps: int
    num_stages: int


def choose_tile(x: torch.Tensor, rows: int, programs: int) -> Tile:
    """Shape of a program for requests of at most `rows` (query, head) pairs per KV head.

    A fixed table, by sizes and device. H200, D 128, KV blocks of 16, 8 queries on 128 to 384 keys,
    between products, us: 8 requests, 64 programs, take 10.6 with tiles of 128 keys, 15.4 of 64; one
    query 8.8 and 13.3; 16 requests 13.4 and 14.1. 32 requests take 15.7 with 64 keys, 18.7 with 32;
    64 requests 30.4 and 24.9, 256 requests 104 and 88.

    Args:
        x: Queries, [..., D], on their device.
        rows: Most queries of a request x Q/K.
        programs: Of the grid, shares of keys not counted. Several a multiprocessor hide each
            other's waits in small tiles; one wants its loads in large pieces.
    """
    head_dim, processors = x.shape[-1], launch.multiprocessors(x.device)
    block_m = min(max(triton.next_power_of_2(rows), 16), 64)
    if x.dtype == torch.float32:  # no tensor cores; larger tiles spill registers
        if head_dim > 64:
            return Tile(16, 16, 4, 1)
        return Tile(16, 32, 4, 1) if block_m == 16 else Tile(32, 32, 8, 1)
    if head_dim > 128:
        return Tile(128, 32, 8, 2) if rows > 64 else Tile(block_m, 32, 4, 2)
    if rows > 64:
        return Tile(128, 64, 8, 3) if head_dim > 64 else Tile(128, 128, 8, 3)
    if block_m <= 32 and programs > 2 * processors:
        return Tile(block_m, 32, 2, 3)
    # with fewer, keys are shared out, and a share is few tiles
    one_each = processors <= 3 * programs and programs <= processors
    if block_m <= 32 and one_each and launch.shared_memory(x.device) >= _LARGE_TILES:
        return Tile(block_m, 128, 4, 3)
    return Tile(block_m, 64, 4, 3)


def choose_num_splits(num_programs: int, max_kv_len: int, block_n: int, num_sms: int) -> int:
    """Shares of the keys, so that every multiprocessor has a program.

    Not more: partial outputs and the joining launch cost 3 us or more. H200, 8 queries on 264 keys:
    8 requests take 10.3 us with 1 share, 10.6 with 2; 1 request 5.9 with 8, 7.9 with 16. A share is
    4 steps or more of the longest request there can be.

    Args:
        num_programs: Programs of a grid without splits.
        max_kv_len: No request has more KV.
        block_n: Keys a step; a share is at least one step.
        num_sms: Multiprocessors.
    """
    shares = max(-(-max_kv_len // (4 * block_n)), min(-(-max_kv_len // block_n), 8))
    return max(1, min(num_sms // num_programs, shares, _MAX_SPLITS))


def paged_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_block_size: int,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
    max_kv_len: int | None = None,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`paged_attention` on the device.

    Args:
        q: [T, Q, D]; the last dimension contiguous, as in the caches.
        k_cache: [slots, K, D].
        v_cache: [slots, K, D], strides as k_cache's.
        block_table: [R, M] int32; entries past a request's last KV block are not read.
        cu_seqlens_q: [R+1] int32; the last is <= T.
        seq_lens: [R] int32, queries included.
        kv_block_size: S, a power of two.
        max_query_len: No request has more queries.
        scale: Multiplies the scores; > 0.
        causal: Among the queries of one request.
        window: Context tokens visible before the first query; 0 = all.
        max_kv_len: No request has more KV; None = M * S.
        num_splits: Shares of the keys, 1 to 64; None = from the other arguments.
        tile: Program shape; None = from the table.

    Returns:
        [T, Q, D]; 0 in rows past cu_seqlens_q[R] and of requests with seq_len 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_reqs, kv_heads = block_table.shape[0], k_cache.shape[1]
    group = num_heads // kv_heads
    _check_layout(q, k_cache, v_cache, kv_block_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_reqs == 0:
        return out.zero_()
    tile = tile or choose_tile(q, max_query_len * group, num_reqs * kv_heads)
    block_m = max(tile.block_m, triton.next_power_of_2(group))
    queries_per_tile = block_m // group
    one_tile = max_query_len <= queries_per_tile
    # requests start at cu[r] // queries_per_tile + r: as many tiles as all of them can need
    num_tiles = num_reqs if one_tile else num_tokens // queries_per_tile + num_reqs
    if num_splits is None:
        kv_len = block_table.shape[1] * kv_block_size if max_kv_len is None else max_kv_len
        num_splits = choose_num_splits(
            num_tiles * kv_heads, kv_len, tile.block_n, launch.multiprocessors(q.device)
        )
    if not 1 <= num_splits <= _MAX_SPLITS:
        raise ValueError(f"num_splits: {num_splits} is not in [1, {_MAX_SPLITS}]")
    split = num_splits > 1
    part, lse = out, out
    if split:
        part = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty(part.shape[:-1], dtype=torch.float32, device=q.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    attention_kernel[(kv_heads, num_splits, num_tiles)](
        out,
        part,
        lse,
        q,
        q.stride(0),
        q.stride(1),
        k_cache,
        v_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        block_table,
        block_table.stride(0),
        cu_seqlens_q,
        seq_lens,
        num_reqs,
        num_tokens,
        scale * LOG2_E,
        window,
        GROUP=group,
        D=head_dim,
        BLOCK_D=block_d,
        S=kv_block_size,
        CAUSAL=causal,
        WINDOW=window > 0,
        SPLIT=split,
        ONE_TILE=one_tile,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        **dependent(q),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        combine_kernel[(num_tokens, num_heads)](
            out,
            part,
            lse,
            cu_seqlens_q,
            num_reqs,
            num_splits,
            D=head_dim,
            BLOCK_D=block_d,
            # a prefill has any number: one kernel for all, or each would be compiled in mid-run
            SPLITS=triton.next_power_of_2(num_splits) if one_tile else _MAX_SPLITS,
            **dependent(q),
            num_warps=4 if num_splits > 8 or not one_tile else 1,
        )
    return out


def _check_layout(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_block_size: int
) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, strides {x.stride()}")
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"v_cache: strides {v_cache.stride()}, k_cache has {k_cache.stride()}")
    if kv_block_size & (kv_block_size - 1):
        raise ValueError(f"kv_block_size: {kv_block_size} is not a power of two")
