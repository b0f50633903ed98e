"""Triton code of paged_attention_triton.py: a tile's pass over its keys, and the joining of splits.

R requests, T tokens, Q heads, K kv heads, D head dim, P slots, M blocks, S KV block size, U splits.
"""

import triton
import triton.language as tl

from engine.kernels.launch import wait_for_inputs


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "window", "table_stride"])
def attention_kernel(
    out_ptr,  # [T, Q, D], out
    part_ptr,  # [U, T, Q, D] float32, out if SPLIT
    lse_ptr,  # [U, T, Q] float32, out if SPLIT
    q_ptr,  # [T, Q, D]
    q_stride_t,
    q_stride_h,
    k_ptr,  # [P, K, D]
    v_ptr,  # [P, K, D]
    kv_stride_p,
    kv_stride_h,
    table_ptr,  # [R, M] int32
    table_stride,
    cu_ptr,  # [R+1] int32
    seq_lens_ptr,  # [R] int32
    num_reqs,  # R
    num_tokens,  # T
    scale,  # of scores, times log2(e)
    window,
    GROUP: tl.constexpr,  # Q / K
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    S: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr,  # no request has more queries than a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One tile against one split of its keys. Grid [K, U, tiles]."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    # late tiles see most keys: they go first
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    num_heads = tl.num_programs(0) * GROUP
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    row = tile
    first_query = 0
    if not ONE_TILE:
        row = _find_request(cu_ptr, num_reqs, tile, BLOCK_Q)
        first_query = (tile - tl.load(cu_ptr + row) // BLOCK_Q - row) * BLOCK_Q
    # loads before their uses, so that they wait together
    begin = tl.load(cu_ptr + row)
    queries = tl.load(cu_ptr + row + 1) - begin
    seq_len = tl.load(seq_lens_ptr + row)
    live_tokens = tl.load(cu_ptr + num_reqs)
    context = seq_len - queries

    low, shared, high = _visible(
        seq_len, context, first_query, first_query + BLOCK_Q, window, CAUSAL, WINDOW
    )
    step = low // BLOCK_N
    end = tl.cdiv(high, BLOCK_N)
    if SPLIT:
        share = tl.cdiv(end - step, num_splits)
        step += split * share
        end = tl.minimum(end, step + share)

    table_ptr += row.to(tl.int64) * table_stride
    k_ptr += head.to(tl.int64) * kv_stride_h
    v_ptr += head.to(tl.int64) * kv_stride_h
    # block ids are loaded a step ahead, so that K and V loads wait for nothing
    blocks = block_ids(table_ptr, step * BLOCK_N, high, S, BLOCK_N)
    # they and the lengths are older than the product that made q: only what follows has to wait.
    # Earlier steps' keys are, too, but to load a share's first ones here took longer (H200, plain
    # steps of one request of the 8B shape 4.82 ms, not 4.73)
    wait_for_inputs(DEPENDENT)
    if split == 0:
        for t in range(live_tokens + tile, num_tokens, tl.num_programs(2)):
            zero_heads(out_ptr, t, head, num_heads, GROUP, D, BLOCK_D)
    if first_query >= queries:
        return

    m = tl.arange(0, BLOCK_M)
    query = first_query + m // GROUP
    d = tl.arange(0, BLOCK_D)
    live = (m // GROUP < BLOCK_Q) & (query < queries)
    token = (begin + query).to(tl.int64)
    q_head = head * GROUP + m % GROUP
    q_ptrs = q_ptr + token[:, None] * q_stride_t + q_head[:, None] * q_stride_h + d[None, :]
    q = tl.load(q_ptrs, mask=live[:, None] & (d < D)[None, :], other=0.0)
    last = tl.where(CAUSAL, context + query, seq_len - 1)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    masked = step
    if not ONE_TILE and not WINDOW:
        masked = tl.maximum(step, tl.minimum(end, shared // BLOCK_N))
        for i in tl.range(step, masked):
            ahead = block_ids(table_ptr, (i + 1) * BLOCK_N, high, S, BLOCK_N)
            acc, top, total = _attend(
                acc, top, total, q, blocks, i * BLOCK_N, low, high, last,
                k_ptr, v_ptr, kv_stride_p, scale, D, BLOCK_D, S, BLOCK_N, False,
            )  # fmt: skip
            blocks = ahead
    for i in tl.range(masked, end):
        ahead = block_ids(table_ptr, (i + 1) * BLOCK_N, high, S, BLOCK_N)
        acc, top, total = _attend(
            acc, top, total, q, blocks, i * BLOCK_N, low, high, last,
            k_ptr, v_ptr, kv_stride_p, scale, D, BLOCK_D, S, BLOCK_N, True,
        )  # fmt: skip
        blocks = ahead

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = token * num_heads + q_head
    if SPLIT:
        at += split.to(tl.int64) * num_tokens * num_heads
        tl.store(lse_ptr + at, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=live)
        live = live & (total > 0)
        out_ptrs = part_ptr + at[:, None] * D + d[None, :]
    else:
        out_ptrs = out_ptr + at[:, None] * D + d[None, :]
    tl.store(out_ptrs, acc.to(out_ptrs.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _find_request(cu_ptr, num_reqs, tile, BLOCK_Q: tl.constexpr):
    """The last request whose first tile, cu[r] // BLOCK_Q + r, is not after `tile`."""
    CHUNK: tl.constexpr = 128
    count = 0
    for i in range(0, num_reqs, CHUNK):
        r = i + tl.arange(0, CHUNK)
        start = tl.load(cu_ptr + r, mask=r < num_reqs, other=0) // BLOCK_Q + r
        count += tl.sum(((start <= tile) & (r < num_reqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _visible(
    seq_len, context, first_query, end_query, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):
    """Keys [low, high) are seen by some query of a tile, [low, shared) by all of them."""
    low = 0
    if WINDOW:
        low = tl.maximum(context - window, 0)
    if CAUSAL:
        shared = tl.minimum(seq_len, tl.maximum(context + first_query + 1, 0))
        high = tl.minimum(seq_len, tl.maximum(context + end_query, 0))
    else:
        shared = seq_len
        high = seq_len
    return low, shared, high


@triton.jit
def zero_heads(
    out_ptr, token, head, num_heads, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A token's output of one KV head's queries."""
    d = tl.arange(0, BLOCK_D)
    row = (tl.zeros((BLOCK_D,), tl.int64) + token) * num_heads + head * GROUP
    for g in range(GROUP):
        zero = tl.zeros((BLOCK_D,), out_ptr.dtype.element_ty)
        tl.store(out_ptr + (row + g) * D + d, zero, mask=d < D)


@triton.jit
def block_ids(table_ptr, start, high, S: tl.constexpr, BLOCK_N: tl.constexpr):
    """KV blocks of keys start to start + BLOCK_N: one if they share it, else one per key."""
    key = start if S >= BLOCK_N else start + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + key // S, mask=key < high, other=0)


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_D] float32: sum of 2^(score - top) v
    top,  # [BLOCK_M] float32: largest score so far
    total,  # [BLOCK_M] float32: sum of 2^(score - top)
    q,  # [BLOCK_M, BLOCK_D]
    blocks,  # block_ids of `start`
    start,  # first key, a multiple of BLOCK_N
    low,
    high,  # keys that may be seen
    last,  # [BLOCK_M]: last key a row sees
    k_ptr,
    v_ptr,
    stride,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # some row does not see some key
):
    """Take keys start to start + BLOCK_N into account."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    key = start + n
    inside = (key >= low) & (key < high)
    if S >= BLOCK_N:
        slot = blocks.to(tl.int64) * S + start % S + n
    else:
        slot = blocks.to(tl.int64) * S + n % S
    at = slot[:, None] * stride + d[None, :]
    if MASKED:
        loaded = inside[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + at, mask=loaded, other=0.0)
        v = tl.load(v_ptr + at, mask=loaded, other=0.0)
    elif D < BLOCK_D:
        k = tl.load(k_ptr + at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(v_ptr + at, mask=(d < D)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at)
        v = tl.load(v_ptr + at)
    # ieee: float32 inputs are multiplied as float32, not as tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        seen = inside[None, :] & (key[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = new_top
    if MASKED:  # a row that has seen no key yet
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def combine_kernel(
    out_ptr,  # [T, Q, D], out
    part_ptr,  # [U, T, Q, D] float32
    lse_ptr,  # [U, T, Q] float32; -inf where a split saw nothing, and wrote nothing
    cu_ptr,  # [R+1] int32
    num_reqs,  # R
    num_splits,  # U
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, U or more
    DEPENDENT: tl.constexpr,
):
    """Join the splits of one (token, head). Grid [T, Q]."""
    token = tl.program_id(0)
    live_tokens = tl.load(cu_ptr + num_reqs)  # older than the shares
    wait_for_inputs(DEPENDENT)
    if token >= live_tokens:
        return
    rows = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    at = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    # all at once: a share that saw nothing has left its part unwritten
    inside = (s < num_splits)[:, None] & (d < D)[None, :]
    part = tl.load(part_ptr + (s * rows + at)[:, None] * D + d[None, :], mask=inside, other=0.0)
    lse = tl.load(lse_ptr + s * rows + at, mask=s < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(part * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + at * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
