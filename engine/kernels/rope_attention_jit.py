"""Triton code of rope_attention.py.

R requests, T tokens, Q heads, K kv heads, D head dim, P slots, M blocks, S KV block size.
"""

import triton
import triton.language as tl

from engine.kernels.launch import wait_for_inputs
from engine.kernels.paged_attention_jit import block_ids, zero_heads
from engine.kernels.rope_store import turned


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "window", "table_stride"])
def rope_attention_kernel(
    out_ptr,  # [T, Q, D], out
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
    BLOCK_M: tl.constexpr,  # >= GROUP * queries of any request
    BLOCK_N: tl.constexpr,
    BLOCK_NEW: tl.constexpr,  # >= queries of any request
    DEPENDENT: tl.constexpr,
):
    """One request and KV head. Grid [K, R]."""
    head, row = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(0)
    num_heads = kv_heads * GROUP
    begin = tl.load(cu_ptr + row)
    queries = tl.load(cu_ptr + row + 1) - begin
    seq_len = tl.load(seq_lens_ptr + row)
    live_tokens = tl.load(cu_ptr + num_reqs)
    q_low, q_high = _norm_weights(q_weight_ptr, HALF, Q_NORM)
    k_low, k_high = _norm_weights(k_weight_ptr, HALF, K_NORM)
    context = seq_len - queries
    low = tl.maximum(context - window, 0) if WINDOW else 0
    step = low // BLOCK_N
    end = tl.cdiv(context, BLOCK_N)
    k_ptr += head.to(tl.int64) * kv_head
    v_ptr += head.to(tl.int64) * kv_head
    table_ptr += row.to(tl.int64) * table_stride
    blocks = block_ids(table_ptr, step * BLOCK_N, context, S, BLOCK_N)
    # lengths and KV blocks are older than the product that made qkv: only what follows has to wait
    wait_for_inputs(DEPENDENT)
    for t in range(live_tokens + row, num_tokens, num_reqs):
        zero_heads(out_ptr, t, head, num_heads, GROUP, 2 * HALF, 2 * HALF)
    if queries <= 0:
        return

    # the new tokens are loaded with the rest, and worked on at the end
    n = tl.arange(0, BLOCK_NEW)
    d = tl.arange(0, 2 * HALF)
    new = n < queries
    new_token = (begin + n).to(tl.int64)
    slot = tl.load(slots_ptr + new_token, mask=new, other=-1)
    k_row = qkv_ptr + new_token[:, None] * qkv_token + (num_heads + head) * qkv_head
    v_row = k_row + kv_heads * qkv_head
    new_v = tl.load(v_row + d[None, :], mask=new[:, None], other=0.0)
    new_a, new_b = _turned(
        k_row, cos_sin_ptr + new_token[:, None] * 2 * HALF, k_low, k_high, eps, new, HALF, K_NORM
    )
    m = tl.arange(0, BLOCK_M)
    query = m // GROUP
    live = query < queries
    token = (begin + query).to(tl.int64)
    q_head = head * GROUP + m % GROUP
    q_a, q_b = _turned(
        qkv_ptr + token[:, None] * qkv_token + q_head[:, None] * qkv_head,
        cos_sin_ptr + token[:, None] * 2 * HALF, q_low, q_high, eps, live, HALF, Q_NORM,
    )  # fmt: skip

    acc = tl.zeros((BLOCK_M, 2 * HALF), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for i in tl.range(step, end):
        # block ids are loaded a step ahead, so that K and V loads wait for nothing
        ahead = block_ids(table_ptr, (i + 1) * BLOCK_N, context, S, BLOCK_N)
        k_a, k_b, v, inside = _load_old(
            blocks, i * BLOCK_N, low, context, k_ptr, v_ptr, kv_slot, HALF, S, BLOCK_N
        )
        acc, top, total = _attend(acc, top, total, q_a, q_b, k_a, k_b, v, inside[None, :], scale)
        blocks = ahead
    seen = new[None, :]
    if CAUSAL:
        seen = seen & (n[None, :] <= query[:, None])
    acc, top, total = _attend(acc, top, total, q_a, q_b, new_a, new_b, new_v, seen, scale)
    column = tl.arange(0, HALF)
    kept = (slot >= 0)[:, None]
    to = slot[:, None] * kv_slot
    tl.store(k_ptr + to + column[None, :], new_a, mask=kept)
    tl.store(k_ptr + to + HALF + column[None, :], new_b, mask=kept)
    tl.store(v_ptr + to + d[None, :], new_v, mask=kept)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = token * num_heads + q_head
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * 2 * HALF + d[None, :], out, mask=live[:, None])


@triton.jit
def _norm_weights(weight_ptr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Halves [1, HALF] of a norm's weight, if there is a norm."""
    column = tl.arange(0, HALF)
    low = tl.zeros((HALF,), tl.float32)
    high = low
    if NORM:
        low = tl.load(weight_ptr + column).to(tl.float32)
        high = tl.load(weight_ptr + HALF + column).to(tl.float32)
    return low[None, :], high[None, :]


@triton.jit
def _turned(x_ptr, angle_ptr, w_a, w_b, eps, live, HALF: tl.constexpr, NORM: tl.constexpr):
    """Heads at x_ptr [N, 1], normed and rotated by the angles at angle_ptr [N, 1], as halves."""
    column = tl.arange(0, HALF)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    raw_a = tl.load(x_ptr + column[None, :], mask=live[:, None], other=0.0)
    raw_b = tl.load(x_ptr + HALF + column[None, :], mask=live[:, None], other=0.0)
    cos = tl.load(angle_ptr + column[None, :], mask=live[:, None], other=0.0)
    sin = tl.load(angle_ptr + HALF + column[None, :], mask=live[:, None], other=0.0)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
    return turned(a, b, scale[:, None], w_a, w_b, cos, sin, dtype, NORM)


@triton.jit
def _load_old(
    blocks,  # block_ids of `start`
    start,  # first key, a multiple of BLOCK_N
    low,
    context,  # keys low to context are seen
    k_ptr,
    v_ptr,
    kv_slot,
    HALF: tl.constexpr,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Both halves of K, V, and which of keys start to start + BLOCK_N are seen."""
    n = tl.arange(0, BLOCK_N)
    column = tl.arange(0, HALF)
    d = tl.arange(0, 2 * HALF)
    key = start + n
    inside = (key >= low) & (key < context)
    slot = blocks.to(tl.int64) * S + (start % S + n if S >= BLOCK_N else n % S)
    at = slot[:, None] * kv_slot
    k_a = tl.load(k_ptr + at + column[None, :], mask=inside[:, None], other=0.0)
    k_b = tl.load(k_ptr + at + HALF + column[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(v_ptr + at + d[None, :], mask=inside[:, None], other=0.0)
    return k_a, k_b, v, inside


@triton.jit
def _attend(
    acc,  # [BLOCK_M, D] float32: sum of 2^(score - top) v
    top,  # [BLOCK_M] float32: largest score so far
    total,  # [BLOCK_M] float32: sum of 2^(score - top)
    q_a,  # [BLOCK_M, HALF]
    q_b,  # [BLOCK_M, HALF]
    k_a,  # [N, HALF]
    k_b,  # [N, HALF]
    v,  # [N, D]
    seen,  # [BLOCK_M, N] or [1, N]
    scale,
):
    """Take N keys into account."""
    scores = tl.dot(q_a, tl.trans(k_a))
    scores = tl.dot(q_b, tl.trans(k_b), scores)
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    # a row that has seen no key yet
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(top - shift)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None])
    return acc, new_top, total
