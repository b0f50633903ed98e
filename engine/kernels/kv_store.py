"""Write K and V of a batch into the paged cache.

    cache[slot(t)] = x[t]   for slot(t) != PAD_SLOT

Moves 2 * T * K * D values twice. Slots of live tokens are distinct. Paged cache after vLLM (Kwon et
al., 2023).
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims


def kv_store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Scatter rows to their slots, in place.

    Args:
        k: [T, K, D].
        v: [T, K, D].
        k_cache: [slots, K, D], one layer.
        v_cache: [slots, K, D].
        slots: [T] int64; negative slots write nothing.
    """
    dims = Dims()
    dims.check("k", k, "T K D")
    dims.check("v", v, "T K D")
    dims.check("k_cache", k_cache, "P K D", k.dtype)
    dims.check("v_cache", v_cache, "P K D", v.dtype)
    dims.check("slots", slots, "T", torch.int64)
    impl = kv_store_triton if slots.is_cuda else kv_store_ref
    impl(k, v, k_cache, v_cache, slots)


def kv_store_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`kv_store` in torch: the definition a kernel is held to."""
    live = slots >= 0
    if not bool(live.all()):
        k, v, slots = k[live], v[live], slots[live]
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def kv_store_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """`kv_store` as one launch, a program per token. Any strides but the last, which must be 1."""
    named = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in named.items():
        if x.stride(-1) != 1:
            raise ValueError(f"{name}: the last dimension must be contiguous, strides {x.stride()}")
    num_tokens, kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block_h, block_d = triton.next_power_of_2(kv_heads), triton.next_power_of_2(head_dim)
    # 16 bytes a thread
    num_warps = min(max(block_h * block_d * k.element_size() // 512, 1), 8)
    strides = [n for x in named.values() for n in x.stride()[:2]]
    _kv_store_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        *strides,
        K=kv_heads,
        D=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        num_warps=num_warps,
    )


@triton.jit
def _kv_store_kernel(
    k_ptr,  # [T, K, D]
    v_ptr,  # [T, K, D]
    k_cache_ptr,  # [P, K, D], out
    v_cache_ptr,  # [P, K, D], out
    slots_ptr,  # [T] int64
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_cache_stride_p,
    k_cache_stride_h,
    v_cache_stride_p,
    v_cache_stride_h,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # int64 before the multiply: token * stride and slot * stride pass 2**31
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (h < K) & (d < D)
    k = tl.load(k_ptr + token * k_stride_t + h * k_stride_h + d, mask=mask)
    v = tl.load(v_ptr + token * v_stride_t + h * v_stride_h + d, mask=mask)
    tl.store(k_cache_ptr + slot * k_cache_stride_p + h * k_cache_stride_h + d, k, mask=mask)
    tl.store(v_cache_ptr + slot * v_cache_stride_p + h * v_cache_stride_h + d, v, mask=mask)
