"""Write K and V of a batch into the paged cache.

    cache[slot(t)] = x[t]   for slot(t) != PAD_SLOT

Moves 2 * T * K * D values twice. Slots of live tokens are distinct.
"""

import torch

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
    kv_store_ref(k, v, k_cache, v_cache, slots)


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
