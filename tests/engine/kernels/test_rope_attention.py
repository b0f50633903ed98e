"""rope_attention: the fused kernel against rope_store and paged_attention one after the other."""

from dataclasses import replace

import pytest
import torch

from engine.kernels.paged_attention import AttentionBatch, paged_attention_ref
from engine.kernels.paged_attention_triton import Tile
from engine.kernels.rope import inverse_frequencies, rope_table
from engine.kernels.rope_attention import (
    fits,
    joins,
    rope_attention_triton,
)
from engine.kernels.rope_store import rope_store_ref
from engine.kernels.slot_mapping import slot_mapping_ref
from tests.engine.kernels.test_paged_attention_triton import PADDING, Case
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]
SMALL = Tile(16, 16, 4, 2)
DTYPES = [torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


class Step:
    """A step over a cache that lacks its own K and V. Slots nobody owns hold NaN."""

    def __init__(
        self,
        query_lens: list[int],
        kv_lens: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 32,
        size: int = 4,
        dtype: torch.dtype = torch.float16,
        norms: bool = True,
    ) -> None:
        case = Case.make(query_lens, kv_lens, heads=heads, dim=dim, size=size, dtype=dtype)
        self.batch: AttentionBatch = case.batch
        tokens = sum(query_lens) + PADDING
        wide = torch.randn(tokens, heads[0] + 2 * heads[1] + 1, dim).to(KERNEL_DEVICE, dtype)
        self.qkv = wide[:, 1:]
        self.norms = [
            torch.randn(dim).to(KERNEL_DEVICE, dtype) if norms else None for _ in range(2)
        ]
        pairs = zip(query_lens, kv_lens, strict=True)
        positions = [p for n, length in pairs for p in range(length - n, length)]
        at = torch.tensor(positions + [0] * PADDING, device=KERNEL_DEVICE)
        table = rope_table(inverse_frequencies(dim, 100.0), max(kv_lens) + 1).to(KERNEL_DEVICE)
        self.cos_sin = table[at]
        self.slots = slot_mapping_ref(case.batch.block_table, at, case.batch.cu_seqlens_q, size)
        self.caches = torch.stack((case.k, case.v))
        self.caches[:, self.slots[self.slots >= 0]] = float("nan")  # must be written first

    def check(self, *, causal: bool = True, window: int = 0, **options: object) -> None:
        """Output within twice the error of the two references; caches as good as theirs."""
        scale, masks = 0.3, {"causal": causal, "window": window}
        got, low = self.caches.clone(), self.caches.clone()
        out = rope_attention_triton(
            self.qkv, *self.norms, 1e-6, self.cos_sin, got[0], got[1], self.slots, self.batch,
            scale=scale, **masks, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        want = self._reference(self.qkv, low, self.norms, scale, causal, window)
        exact_cache = self.caches.float()
        weights = [None if w is None else w.float() for w in self.norms]
        exact = self._reference(self.qkv.float(), exact_cache, weights, scale, causal, window)
        assert bool((out[-PADDING:] == 0).all())
        assert_as_good_as(out, exact, want)
        known = low.isfinite()
        assert torch.equal(known, got.isfinite())
        assert_as_good_as(got[known], exact_cache[known], low[known])

    def _reference(
        self,
        qkv: torch.Tensor,
        caches: torch.Tensor,
        norms: list[torch.Tensor | None],
        scale: float,
        causal: bool,
        window: int,
    ) -> torch.Tensor:
        q = rope_store_ref(qkv, *norms, 1e-6, self.cos_sin, caches[0], caches[1], self.slots)
        return paged_attention_ref(
            q, caches[0], caches[1], self.batch, scale=scale, causal=causal, window=window
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 3, 21])
@pytest.mark.parametrize("causal", [True, False])
def test_masks(causal: bool, window: int, dtype: torch.dtype) -> None:
    # requests without context, of less than a step, of several steps, and one without queries
    step = Step([1, 5, 0, 3, 4], [7, 5, 9, 38, 18], dtype=dtype)
    step.check(causal=causal, window=window, tile=SMALL)


@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (6, 2), (4, 1), (8, 1), (20, 1)])
@pytest.mark.parametrize("norms", [True, False])
def test_groups(heads: tuple[int, int], norms: bool) -> None:
    step = Step([2, 3], [20, 11], heads=heads, norms=norms)
    step.check(tile=SMALL)
    step.check()


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_head_dims_and_kv_blocks(dim: int, size: int) -> None:
    step = Step([3, 8], [70, 20], heads=(2, 1), dim=dim, size=size)
    step.check(tile=SMALL)


def test_no_tokens() -> None:
    step = Step([0, 0], [5, 0])
    step.check()


def test_who_takes_it() -> None:
    def asked(dtype: torch.dtype, dim: int, queries: int) -> bool:
        batch = replace(Step([1], [3]).batch, query_lens=(queries,))
        return fits(4, torch.zeros(9, 2, dim, dtype=dtype), batch)

    assert asked(torch.float16, 64, 8)
    assert asked(torch.float16, 64, 32)
    assert not asked(torch.float16, 64, 33)  # more than a program's rows
    assert not asked(torch.float32, 64, 8)  # no matrix unit takes float32 exactly
    assert not asked(torch.float16, 80, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("reqs", [8, 16, 40])
def test_large_steps_that_it_takes(reqs: int) -> None:
    kv_lens = torch.randint(100, 1400, (reqs,)).tolist()
    step = Step([8] * reqs, kv_lens, heads=(32, 8), dim=128, size=16, dtype=torch.bfloat16)
    step.check()
    step.check(causal=False, window=200)
    bounds = replace(step.batch, query_lens=(8,), kv_lens=(2048,), kv_index=())
    assert joins(32, step.caches[0], bounds)
