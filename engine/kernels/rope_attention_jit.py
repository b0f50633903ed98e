"""Triton code of rope_attention.py.

R requests, T tokens, Q heads, K kv heads, D head dim, P slots, M blocks, S KV block size, U shares.
"""

import triton
import triton.language as tl

from engine.kernels.launch import wait_for_inputs
from engine.kernels.paged_attention_jit import block_ids, visible_keys, zero_heads


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "window", "table_stride"])
def rope_attention_kernel(
    out_ptr,  # [T, Q, D], out
    part_ptr,  # [U, T, Q, D] float32, scratch if U > 1
    lse_ptr,  # [U, T, Q] float32, scratch if U > 1
    arrivals_ptr,  # [R * K] int32, 0 before and after; if U > 1
    qkv_ptr,  # [T, Q+2K, D]
    qkv_token,
    qkv_head,
    q_weight_ptr,  # [D]; Q_NORM only
    k_weight_ptr,  # [D]; K_NORM only
    eps,
    cos_sin_ptr,  # [T, 2, HALF] float32
    slots_ptr,  # [T] int64
    k_ptr,  # [P, K, D], in and out
    v_ptr,  # [P, K, D], in and out
    kv_slot,
    kv_head,
    table_ptr,  # [R, M] int32
    table_stride,
    cu_ptr,  # [R+1] int32
    seq_lens_ptr,  # [R] int32
    num_reqs,  # R
    num_tokens,  # T
    scale,  # of scores, times log2(e)
    window,
    GROUP: tl.constexpr,  # Q / K
    HALF: tl.constexpr,  # D / 2
    S: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARES: tl.constexpr,  # U
    BLOCK_M: tl.constexpr,  # >= GROUP * queries of any request
    BLOCK_N: tl.constexpr,
    BLOCK_NEW: tl.constexpr,  # >= queries of any request
    DEPENDENT: tl.constexpr,
):
    """One request, KV head and share of the keys. Grid [K, U, R]."""
    head, share, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(0)
    num_heads = kv_heads * GROUP
    begin = tl.load(cu_ptr + row)
    queries = tl.load(cu_ptr + row + 1) - begin
    seq_len = tl.load(seq_lens_ptr + row)
    live_tokens = tl.load(cu_ptr + num_reqs)
    # the lengths are older than the product that made qkv: only what follows has to wait
    wait_for_inputs(DEPENDENT)
    if share == 0:
        for t in range(live_tokens + row, num_tokens, num_reqs):
            zero_heads(out_ptr, t, head, num_heads, GROUP, 2 * HALF, 2 * HALF)
    if queries <= 0:
        return
    context = seq_len - queries
    low, _shared, high = visible_keys(seq_len, context, 0, BLOCK_NEW, window, CAUSAL, WINDOW)
    step = low // BLOCK_N
    end = tl.cdiv(high, BLOCK_N)
    if SHARES > 1:
        each = tl.cdiv(end - step, SHARES)
        step += share * each
        end = tl.minimum(end, step + each)
    k_ptr += head.to(tl.int64) * kv_head
    v_ptr += head.to(tl.int64) * kv_head
    if end * BLOCK_N > context:
        # new keys on a boundary are stored by both neighbours, to the same bits
        _store_new(
            k_ptr, v_ptr, kv_slot, qkv_ptr, qkv_token, qkv_head, k_weight_ptr, eps, cos_sin_ptr,
            slots_ptr, begin, queries, num_heads + head, kv_heads, HALF, K_NORM, BLOCK_NEW,
        )  # fmt: skip
        # read back below by other threads of this program
        tl.debug_barrier()

    table_ptr += row.to(tl.int64) * table_stride
    blocks = block_ids(table_ptr, step * BLOCK_N, high, S, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    live = query < queries
    token = (begin + query).to(tl.int64)
    q_head = head * GROUP + m % GROUP
    q_a, q_b = _turned(
        qkv_ptr + token[:, None] * qkv_token + q_head[:, None] * qkv_head,
        cos_sin_ptr + token[:, None] * 2 * HALF, q_weight_ptr, eps, live, HALF, Q_NORM,
    )  # fmt: skip
    last = tl.where(CAUSAL, context + query, seq_len - 1)
    d = tl.arange(0, 2 * HALF)
    acc = tl.zeros((BLOCK_M, 2 * HALF), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.range(step, end):
        # block ids are loaded a step ahead, so that K and V loads wait for nothing
        ahead = block_ids(table_ptr, (i + 1) * BLOCK_N, high, S, BLOCK_N)
        acc, top, total = _attend(
            acc, top, total, q_a, q_b, blocks, i * BLOCK_N, low, high, last,
            k_ptr, v_ptr, kv_slot, scale, HALF, S, BLOCK_N,
        )  # fmt: skip
        blocks = ahead
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = token * num_heads + q_head
    if SHARES == 1:
        out = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * 2 * HALF + d[None, :], out, mask=live[:, None])
        return
    rows = num_tokens.to(tl.int64) * num_heads
    mine = at + share * rows
    tl.store(lse_ptr + mine, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=live)
    wrote = live & (total > 0)
    tl.store(part_ptr + mine[:, None] * 2 * HALF + d[None, :], acc, mask=wrote[:, None])
    # every thread's share is written before the one that counts says so
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row * kv_heads + head, 1, sem="acq_rel")
    if arrived == SHARES - 1:
        tl.store(arrivals_ptr + row * kv_heads + head, 0)
        _join(out_ptr, part_ptr, lse_ptr, at, rows, live, HALF, SHARES, BLOCK_M)


@triton.jit
def _turned(x_ptr, angle_ptr, weight_ptr, eps, live, HALF: tl.constexpr, NORM: tl.constexpr):
    """Heads at x_ptr [N, 1], normed and rotated by the angles at angle_ptr [N, 1], as halves."""
    column = tl.arange(0, HALF)
    dtype = x_ptr.dtype.element_ty
    raw_a = tl.load(x_ptr + column[None, :], mask=live[:, None], other=0.0)
    raw_b = tl.load(x_ptr + HALF + column[None, :], mask=live[:, None], other=0.0)
    cos = tl.load(angle_ptr + column[None, :], mask=live[:, None], other=0.0)
    sin = tl.load(angle_ptr + HALF + column[None, :], mask=live[:, None], other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
        w_a = tl.load(weight_ptr + column).to(tl.float32)[None, :]
        w_b = tl.load(weight_ptr + HALF + column).to(tl.float32)[None, :]
        # rounded where rms_norm rounds
        a = ((a * scale[:, None]).to(dtype).to(tl.float32) * w_a).to(dtype).to(tl.float32)
        b = ((b * scale[:, None]).to(dtype).to(tl.float32) * w_b).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _store_new(
    k_ptr,  # one head
    v_ptr,
    kv_slot,
    qkv_ptr,
    qkv_token,
    qkv_head,
    k_weight_ptr,
    eps,
    cos_sin_ptr,
    slots_ptr,
    begin,
    queries,
    k_head,  # of qkv
    kv_heads,
    HALF: tl.constexpr,
    K_NORM: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
):
    """K and V of a request's new tokens into the cache."""
    n = tl.arange(0, BLOCK_NEW)
    column = tl.arange(0, HALF)
    live = n < queries
    token = (begin + n).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=live, other=-1)
    kept = (slot >= 0)[:, None]
    source = qkv_ptr + token[:, None] * qkv_token + k_head * qkv_head
    k_a, k_b = _turned(
        source, cos_sin_ptr + token[:, None] * 2 * HALF, k_weight_ptr, eps, live, HALF, K_NORM
    )
    to = slot[:, None] * kv_slot + column[None, :]
    tl.store(k_ptr + to, k_a, mask=kept)
    tl.store(k_ptr + to + HALF, k_b, mask=kept)
    source += kv_heads * qkv_head
    v_a = tl.load(source + column[None, :], mask=live[:, None], other=0.0)
    v_b = tl.load(source + HALF + column[None, :], mask=live[:, None], other=0.0)
    tl.store(v_ptr + to, v_a, mask=kept)
    tl.store(v_ptr + to + HALF, v_b, mask=kept)


@triton.jit
def _attend(
    acc,  # [BLOCK_M, D] float32: sum of 2^(score - top) v
    top,  # [BLOCK_M] float32: largest score so far
    total,  # [BLOCK_M] float32: sum of 2^(score - top)
    q_a,  # [BLOCK_M, HALF]
    q_b,  # [BLOCK_M, HALF]
    blocks,  # block_ids of `start`
    start,  # first key, a multiple of BLOCK_N
    low,
    high,  # keys that may be seen
    last,  # [BLOCK_M]: last key a row sees
    k_ptr,
    v_ptr,
    kv_slot,
    scale,
    HALF: tl.constexpr,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take keys start to start + BLOCK_N into account."""
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HALF)
    d = tl.arange(0, 2 * HALF)
    key = start + n
    inside = (key >= low) & (key < high)
    slot = blocks.to(tl.int64) * S + (start % S + n if S >= BLOCK_N else n % S)
    at = slot[:, None] * kv_slot
    k_a = tl.load(k_ptr + at + column[None, :], mask=inside[:, None], other=0.0)
    k_b = tl.load(k_ptr + at + HALF + column[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(v_ptr + at + d[None, :], mask=inside[:, None], other=0.0)
    scores = tl.dot(q_a, tl.trans(k_a), input_precision="ieee")
    scores = tl.dot(q_b, tl.trans(k_b), scores, input_precision="ieee")
    scores = tl.where(inside[None, :] & (key[None, :] <= last[:, None]), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # a row that has seen no key yet
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _join(
    out_ptr,
    part_ptr,
    lse_ptr,
    at,  # [BLOCK_M] int64, (token, head)
    rows,  # T * Q
    live,  # [BLOCK_M]
    HALF: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Add up the shares in their order. From the L2 cache: other processors wrote them."""
    d = tl.arange(0, 2 * HALF)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    for s in tl.static_range(SHARES):
        lse = tl.load(lse_ptr + s * rows + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, lse)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, 2 * HALF), tl.float32)
    for s in tl.static_range(SHARES):
        lse = tl.load(lse_ptr + s * rows + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(lse - top)
        wrote = (lse > float("-inf"))[:, None]
        source = part_ptr + (s * rows + at)[:, None] * 2 * HALF + d[None, :]
        part = tl.load(source, mask=wrote, other=0.0, cache_modifier=".cg")
        total += weight
        acc += weight[:, None] * part
    out = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * 2 * HALF + d[None, :], out, mask=live[:, None])
