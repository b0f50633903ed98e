"""rope_store: the kernel against its reference, and the reference against its formula."""

import pytest
import torch

from engine.kernels.contract import PAD_SLOT
from engine.kernels.norms import rms_norm_ref
from engine.kernels.rope import inverse_frequencies, rope_ref, rope_table
from engine.kernels.rope_store import rope_store, rope_store_ref, rope_store_triton
from tests.engine.kernels.test_layer_kernels import DTYPES, held, randn
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

SLOTS = 40
pytestmark = pytest.mark.usefixtures("poison")


def angles(tokens: int, dim: int) -> torch.Tensor:
    table = rope_table(inverse_frequencies(dim, 10000.0), 4000)
    return table[torch.randint(0, 4000, (tokens,))].to(KERNEL_DEVICE)


def some_slots(tokens: int) -> torch.Tensor:
    slots = torch.randperm(SLOTS)[:tokens]
    slots[tokens // 2 + 1 :: 3] = PAD_SLOT
    return slots.to(KERNEL_DEVICE)


def caches(kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((2, SLOTS, kv_heads, dim), 7.0, dtype=dtype, device=KERNEL_DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 32), (3, 4, 2, 128), (5, 0, 3, 64), (7, 9, 3, 80), (9, 32, 8, 32), (2, 16, 16, 64)],
)
@pytest.mark.parametrize("norms", ["qk", "k", ""])
def test_kernel_matches_reference(
    tokens: int, heads: int, kv_heads: int, dim: int, norms: str, dtype: torch.dtype
) -> None:
    qkv = 2 * randn(tokens, heads + 2 * kv_heads + 1, dim, dtype=dtype)[:, 1:]  # a strided view
    q = randn(dim, dtype=dtype) if "q" in norms else None
    k = randn(dim, dtype=dtype) if "k" in norms else None
    cos_sin, slots = angles(tokens, dim), some_slots(tokens)
    got, low = caches(kv_heads, dim, dtype), caches(kv_heads, dim, dtype)
    exact = caches(kv_heads, dim, torch.float32)
    out = rope_store_triton(qkv, q, k, 1e-6, cos_sin, got[0], got[1], slots)
    want = rope_store_ref(qkv, q, k, 1e-6, cos_sin, low[0], low[1], slots)
    wide = [None if w is None else w.float() for w in (q, k)]
    best = rope_store_ref(qkv.float(), *wide, 1e-6, cos_sin, exact[0], exact[1], slots)
    if heads:
        held(out, best, want)
    held(got[0], exact[0], low[0])
    assert torch.equal(got[1], low[1])
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[slots[slots >= 0].cpu()] = False
    assert bool((got[:, untouched] == 7.0).all())


@pytest.mark.parametrize("norms", [True, False])
def test_reference_is_norm_then_rope_then_store(norms: bool) -> None:
    qkv, q, k = torch.randn(2, 7, 8), torch.randn(8), torch.randn(8)
    cos_sin = rope_table(inverse_frequencies(8, 100.0), 10)[[3, 7]]
    cache = torch.zeros(2, 5, 2, 8)
    weights = (q, k) if norms else (None, None)
    out = rope_store(qkv, *weights, 1e-6, cos_sin, cache[0], cache[1], torch.tensor([4, -1]))
    heads, keys = qkv[:, :3], qkv[:, 3:5]
    if norms:
        heads, keys = rms_norm_ref(heads, q, 1e-6), rms_norm_ref(keys, k, 1e-6)
    assert torch.equal(out, rope_ref(heads, cos_sin))
    assert torch.equal(cache[0, 4], rope_ref(keys, cos_sin)[0])
    assert torch.equal(cache[1, 4], qkv[0, 5:])
    assert not bool(cache[:, :4].any())


@needs_triton
def test_no_tokens() -> None:
    cache = caches(2, 16, torch.float32)
    out = rope_store_triton(
        torch.randn(0, 6, 16, device=KERNEL_DEVICE),
        None,
        None,
        1e-6,
        angles(0, 16),
        cache[0],
        cache[1],
        torch.zeros(0, dtype=torch.int64, device=KERNEL_DEVICE),
    )
    assert out.shape == (0, 2, 16)
    assert bool((cache == 7.0).all())


@needs_triton
def test_layouts_are_checked() -> None:
    qkv, cos_sin = torch.zeros(3, 6, 16, device=KERNEL_DEVICE), angles(3, 16)
    slots = torch.zeros(3, dtype=torch.int64, device=KERNEL_DEVICE)
    cache = caches(2, 16, torch.float32)
    turned = cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="k_cache: the last dimension must be contiguous"):
        rope_store_triton(qkv, None, None, 1e-6, cos_sin, turned[0], turned[1], slots)
    wide = torch.zeros(SLOTS, 4, 16, device=KERNEL_DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="v_cache: strides"):
        rope_store_triton(qkv, None, None, 1e-6, cos_sin, cache[0], wide, slots)


def test_wrong_shape_names_the_argument() -> None:
    cache = torch.zeros(2, 6, 1, 2)
    with pytest.raises(ValueError, match=r"slots: expected \[T\]"):
        rope_store(
            torch.zeros(3, 4, 2),
            None,
            None,
            1e-6,
            torch.zeros(3, 2, 1),
            cache[0],
            cache[1],
            torch.zeros(2, dtype=torch.int64),
        )


@pytest.mark.gpu
def test_slots_past_two_to_the_31st_element() -> None:
    # slot * stride is 2.2e9 here: 32-bit arithmetic would write before the cache
    cache = torch.zeros(2, 2_200_000, 8, 128, dtype=torch.bfloat16, device="cuda")
    qkv = torch.randn(2, 16, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([2_199_999, 3], device="cuda")
    cos_sin = rope_table(inverse_frequencies(128, 100.0), 1)[[0, 0]].cuda()  # no rotation
    rope_store(qkv, None, None, 1e-6, cos_sin, cache[0], cache[1], slots)
    assert torch.equal(cache[0, slots], qkv[:, :8])
    assert torch.equal(cache[1, slots], qkv[:, 8:])
