"""What happens between the product that makes q, k and v and attention, in one launch.

    q[t] = rope(norm(q[t]));   cache[slot(t)] = rope(norm(k[t])), v[t]   for slot(t) != PAD_SLOT

Norms (Qwen3's, per head) are optional. Slots of live tokens are distinct. Moves 2 * T * (Q + 2K) *
D values; norm, rope and store by themselves would move K's and V's twice. Paged cache after vLLM
(Kwon et al., 2023).
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.norms import rms_norm_ref
from engine.kernels.rope import rope_ref


def rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate q and k heads; k and v go to their slots, in place.

    Args:
        qkv: [T, Q + 2K, D]: query heads (Q may be 0), key heads, value heads.
        q_weight: [D] RMS norm of query heads, or None for no norm.
        k_weight: [D] RMS norm of key heads, or None.
        eps: Of both norms.
        cos_sin: [T, 2, D/2] float32, rows of `rope_table` at each token's position.
        k_cache: [slots, K, D], one layer.
        v_cache: [slots, K, D].
        slots: [T] int64; negative slots write nothing.

    Returns:
        [T, Q, D] in qkv's dtype.
    """
    dims = Dims()
    dims.check("qkv", qkv, "T _ D")
    dims.check("k_cache", k_cache, "P K D", qkv.dtype)
    dims.check("v_cache", v_cache, "P K D", qkv.dtype)
    dims.check("cos_sin", cos_sin, "T 2 _", torch.float32)
    dims.check("slots", slots, "T", torch.int64)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            dims.check(name, weight, "D", qkv.dtype)
    impl = rope_store_triton if qkv.is_cuda else rope_store_ref
    return impl(qkv, q_weight, k_weight, eps, cos_sin, k_cache, v_cache, slots)


def rope_store_ref(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """`rope_store` in torch: the definition a kernel is held to."""
    kv_heads = k_cache.shape[1]
    num_heads = qkv.shape[1] - 2 * kv_heads
    q_k, v = qkv[:, : num_heads + kv_heads], qkv[:, num_heads + kv_heads :]
    if q_weight is not None or k_weight is not None:
        q, k = q_k[:, :num_heads], q_k[:, num_heads:]
        q = q if q_weight is None else rms_norm_ref(q, q_weight, eps)
        k = k if k_weight is None else rms_norm_ref(k, k_weight, eps)
        q_k = torch.cat((q, k), dim=1)
    q_k = rope_ref(q_k, cos_sin)
    kv_store_ref(q_k[:, num_heads:], v, k_cache, v_cache, slots)
    return q_k[:, :num_heads]


def kv_store_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Scatter k and v [T, K, D] to their slots; negative slots write nothing."""
    live = slots >= 0
    if not bool(live.all()):
        k, v, slots = k[live], v[live], slots[live]
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def rope_store_triton(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """`rope_store` as one launch: a program per token and group of heads.

    Any strides but the last of each, which must be 1.
    """
    for name, x in (("qkv", qkv), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, strides {x.stride()}")
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"v_cache: strides {v_cache.stride()}, k_cache has {k_cache.stride()}")
    num_tokens, num_rows, head_dim = qkv.shape
    kv_heads = k_cache.shape[1]
    out = torch.empty(
        (num_tokens, num_rows - 2 * kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device
    )
    if num_tokens == 0:
        return out
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(triton.next_power_of_2(num_rows), max(1, 1024 // half))
    _rope_store_kernel[(num_tokens, triton.cdiv(num_rows, heads))](
        out,
        k_cache,
        v_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        qkv,
        qkv.stride(0),
        qkv.stride(1),
        out if q_weight is None else q_weight,
        out if k_weight is None else k_weight,
        eps,
        cos_sin.contiguous(),
        slots,
        Q=num_rows - 2 * kv_heads,
        K=kv_heads,
        HALF=head_dim // 2,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HEADS=heads,
        BLOCK=half,
        **dependent(qkv),
    )
    return out


@triton.jit
def _rope_store_kernel(
    out_ptr,  # [T, Q, 2*HALF], out
    k_cache_ptr,  # [P, K, 2*HALF], out
    v_cache_ptr,  # [P, K, 2*HALF], out
    cache_slot,
    cache_head,
    qkv_ptr,  # [T, Q+2K, 2*HALF]
    qkv_token,
    qkv_head,
    q_weight_ptr,  # [2*HALF]; Q_NORM only
    k_weight_ptr,  # [2*HALF]; K_NORM only
    eps,
    cos_sin_ptr,  # [T, 2, HALF] float32
    slots_ptr,  # [T] int64
    Q: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HALF
    DEPENDENT: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    if Q_NORM:
        q_low = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
    if K_NORM:
        k_low = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)
    # int64 before the multiply: token * stride and slot * stride pass 2**31
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = (head < Q + 2 * K)[:, None] & inside[None, :]
    at = qkv_ptr + token * qkv_token + head[:, None] * qkv_head + column[None, :]
    angle = cos_sin_ptr + token * 2 * HALF + column
    slot = tl.load(slots_ptr + token)
    raw_a = tl.load(at, mask=live, other=0.0)
    raw_b = tl.load(at + HALF, mask=live, other=0.0)
    cos = tl.load(angle, mask=inside, other=0.0)[None, :]
    sin = tl.load(angle + HALF, mask=inside, other=0.0)[None, :]
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    is_q = (head < Q)[:, None]
    if Q_NORM or K_NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
        normed_a = (a * scale[:, None]).to(dtype).to(tl.float32)
        normed_b = (b * scale[:, None]).to(dtype).to(tl.float32)
        if Q_NORM:
            a = tl.where(is_q, (normed_a * q_low[None, :]).to(dtype).to(tl.float32), a)
            b = tl.where(is_q, (normed_b * q_high[None, :]).to(dtype).to(tl.float32), b)
        if K_NORM:
            a = tl.where(is_q, a, (normed_a * k_low[None, :]).to(dtype).to(tl.float32))
            b = tl.where(is_q, b, (normed_b * k_high[None, :]).to(dtype).to(tl.float32))
    turned_a = (a * cos - b * sin).to(dtype)
    turned_b = (b * cos + a * sin).to(dtype)
    if Q > 0:
        to = out_ptr + (token * Q + head[:, None]) * 2 * HALF + column[None, :]
        tl.store(to, turned_a, mask=live & is_q)
        tl.store(to + HALF, turned_b, mask=live & is_q)
    slots = tl.zeros((BLOCK,), tl.int64) + slot
    kept = live & (slots >= 0)[None, :]
    is_k = ((head >= Q) & (head < Q + K))[:, None]
    to = slot * cache_slot + (head - Q)[:, None] * cache_head + column[None, :]
    tl.store(k_cache_ptr + to, turned_a, mask=kept & is_k)
    tl.store(k_cache_ptr + to + HALF, turned_b, mask=kept & is_k)
    is_v = (head >= Q + K)[:, None]
    to = slot * cache_slot + (head - Q - K)[:, None] * cache_head + column[None, :]
    tl.store(v_cache_ptr + to, raw_a, mask=kept & is_v)
    tl.store(v_cache_ptr + to + HALF, raw_b, mask=kept & is_v)


@triton.jit
def turned(a, b, scale, low, high, cos, sin, dtype: tl.constexpr, NORM: tl.constexpr):
    """Halves of heads, float32 blocks whose values `dtype` has, normed and rotated.

    Rounded where `rms_norm` rounds. `scale` is each head's, `low` and `high` are the weight.
    """
    if NORM:
        a = ((a * scale).to(dtype).to(tl.float32) * low).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * high).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
