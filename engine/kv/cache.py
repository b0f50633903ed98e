"""K and V of target and draft layers, over one block table."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One network's cache. L layers, P = num_blocks * kv_block_size slots, K heads, D head dim."""

    k: torch.Tensor  # [L, P, K, D]
    v: torch.Tensor  # [L, P, K, D]
    kv_block_size: int

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        kv_block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "PagedKV":
        """Zeroed memory: stale bits in an unwritten slot must not be NaN."""
        shape = (num_layers, num_blocks * kv_block_size, num_kv_heads, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
            kv_block_size,
        )


def bytes_per_block(
    num_layers: int, kv_block_size: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Bytes that one KV block takes in one network's cache."""
    return 2 * num_layers * kv_block_size * num_kv_heads * head_dim * itemsize
