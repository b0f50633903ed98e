"""kv_store: the kernel against the reference, bit for bit (GPU, or the Triton interpreter)."""

import pytest
import torch

from engine.kernels.contract import PAD_SLOT
from engine.kernels.kv_store import kv_store, kv_store_ref, kv_store_triton
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

SLOTS = 40


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 8), (7, 2, 64), (9, 3, 80), (4, 8, 128)])
@pytest.mark.parametrize("strided", [True, False])
def test_kernel_matches_reference(
    shape: tuple[int, int, int], strided: bool, dtype: torch.dtype
) -> None:
    tokens, kv_heads, dim = shape
    qkv = torch.randn(tokens, 4 * kv_heads, dim, device=KERNEL_DEVICE).to(dtype)
    k, v = qkv[:, :kv_heads], qkv[:, 2 * kv_heads : 3 * kv_heads]
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    slots = torch.randperm(SLOTS, device=KERNEL_DEVICE)[:tokens]
    slots[tokens // 2 + 1 :: 3] = PAD_SLOT
    nan = torch.full((2, SLOTS, kv_heads, dim), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    got, want = nan.clone(), nan.clone()
    kv_store_triton(k, v, got[0], got[1], slots)
    kv_store_ref(k, v, want[0], want[1], slots)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@needs_triton
def test_nothing_but_padding_and_nothing_at_all() -> None:
    x = torch.randn(3, 2, 16, device=KERNEL_DEVICE)
    cache = torch.full((2, 5, 2, 16), 7.0, device=KERNEL_DEVICE)
    slots = torch.full((3,), PAD_SLOT, device=KERNEL_DEVICE)
    kv_store_triton(x, x, cache[0], cache[1], slots)
    kv_store_triton(x[:0], x[:0], cache[0], cache[1], slots[:0])
    assert bool((cache == 7.0).all())


@needs_triton
def test_layouts_are_checked() -> None:
    x = torch.zeros(3, 16, 2, device=KERNEL_DEVICE).transpose(1, 2)
    slots = torch.zeros(3, dtype=torch.int64, device=KERNEL_DEVICE)
    with pytest.raises(ValueError, match="v: the last dimension must be contiguous"):
        kv_store_triton(x.contiguous(), x, x.contiguous(), x.contiguous(), slots)


@pytest.mark.gpu
def test_slots_past_two_to_the_31st_element() -> None:
    # slot * stride is 2.2e9 here: 32-bit arithmetic would write before the cache
    caches = torch.zeros(2, 2_200_000, 8, 128, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(2, 8, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([2_199_999, 3], device="cuda")
    kv_store(x, -x, caches[0], caches[1], slots)
    assert torch.equal(caches[0, slots], x)
    assert torch.equal(caches[1, slots], -x)
