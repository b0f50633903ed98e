"""Paged attention's kernels against a dense float64 oracle: at most twice the reference's error.

Every case has NaN in the slots no request owns, garbage in the block table past a request's last
block, a strided q, padding tokens after the last request, and poisoned memory for the output.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine.kernels import paged_attention_triton as module
from engine.kernels.paged_attention import (
    AttentionBatch,
    locate_kv,
    paged_attention,
    paged_attention_ref,
)
from engine.kernels.paged_attention_triton import (
    Tile,
    choose_num_splits,
    choose_tile,
    paged_attention_triton,
)
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

SMALL = Tile(16, 16, 4, 2)  # several tiles and steps at sizes the interpreter can bear
GARBAGE = -(2**31) + 7
PADDING = 3
no_bfloat16 = pytest.mark.skipif(
    INTERPRETED, reason="the interpreter multiplies bfloat16 as integers"
)


@dataclass(frozen=True)
class Case:
    q: torch.Tensor  # [T, Q, D], contiguous
    k: torch.Tensor
    v: torch.Tensor
    batch: AttentionBatch

    @classmethod
    def make(
        cls,
        query_lens: list[int],
        kv_lens: list[int],
        *,
        heads: tuple[int, int] = (4, 2),
        dim: int = 32,
        size: int = 4,
        dtype: torch.dtype = torch.float32,
        scattered: bool = True,
    ) -> "Case":
        (num_heads, kv_heads), tokens = heads, sum(query_lens) + PADDING
        used = [-(-n // size) for n in kv_lens]
        order = torch.randperm(sum(used) + 5) if scattered else torch.arange(sum(used))
        columns = max(used) + 2
        table = torch.full((len(kv_lens), columns), GARBAGE, dtype=torch.int32)
        caches = torch.full((2, (sum(used) + 5) * size, kv_heads, dim), float("nan"), dtype=dtype)
        index, begin = [], 0
        for r, (n, blocks) in enumerate(zip(kv_lens, used, strict=True)):
            ids = order[begin : begin + blocks]
            table[r, :blocks] = ids.int()
            begin += blocks
            slots = locate_kv(ids.tolist(), n, size, ids.device) if n else slice(0, 0)
            caches[:, slots] = torch.randn(2, n, kv_heads, dim).to(dtype)
            index.append(slots.to(KERNEL_DEVICE) if isinstance(slots, torch.Tensor) else slots)
        cu = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = AttentionBatch(
            table.to(KERNEL_DEVICE),
            cu.to(KERNEL_DEVICE),
            torch.tensor(kv_lens, dtype=torch.int32, device=KERNEL_DEVICE),
            size,
            tuple(query_lens),
            tuple(kv_lens),
            tuple(index),
        )
        q = torch.randn(tokens, num_heads, dim).to(dtype)
        return cls(*(x.to(KERNEL_DEVICE) for x in (q, caches[0], caches[1])), batch)

    def exact(self, scale: float, causal: bool, window: int) -> torch.Tensor:
        """Dense float64 attention with the docstring's mask, then float32."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=KERNEL_DEVICE)
        group = self.q.shape[1] // self.k.shape[1]
        b, begin = self.batch, 0
        for n, length, slots in zip(b.query_lens, b.kv_lens, b.kv_index, strict=True):
            if n == 0 or length == 0:
                continue
            k, v = (x[slots].double().repeat_interleave(group, 1) for x in (self.k, self.v))
            i, j = (torch.arange(m, device=KERNEL_DEVICE) for m in (n, length))
            i, context = i[:, None], length - n
            seen = (j < context) | (j - context <= (i if causal else i + length))
            if window:
                seen = seen & (j >= context - window)
            q = self.q[begin : begin + n].double()
            scores = torch.einsum("ihd,jhd->hij", q, k) * scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[begin : begin + n] = torch.einsum("hij,jhd->ihd", weights, v)
            begin += n
        return out.float()

    def kernel(self, **options: Any) -> torch.Tensor:
        """The kernel's output; q is a slice of a wider tensor."""
        b = self.batch
        wide = torch.cat((self.q, torch.full_like(self.q, float("nan"))), dim=1)
        return paged_attention_triton(
            wide[:, : self.q.shape[1]],
            self.k,
            self.v,
            b.block_table,
            b.cu_seqlens_q,
            b.seq_lens,
            kv_block_size=b.kv_block_size,
            max_query_len=b.max_query_len,
            **options,
        )

    def check(
        self, *, scale: float = 0.3, causal: bool = True, window: int = 0, **options: Any
    ) -> None:
        """Kernel within twice the reference's error; padding rows exactly 0."""
        out = self.kernel(scale=scale, causal=causal, window=window, **options)
        low = paged_attention_ref(
            self.q, self.k, self.v, self.batch, scale=scale, causal=causal, window=window
        )
        assert bool((out[-PADDING:] == 0).all())
        assert_as_good_as(out, self.exact(scale, causal, window), low, factor(self.q.dtype))


def factor(dtype: torch.dtype) -> float:
    """2; in float32, where only the order of summation differs and keys are added one by one, 4."""
    return 4.0 if dtype == torch.float32 else 2.0


pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("window", [0, 3, 21])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_and_splits(causal: bool, window: int, num_splits: int) -> None:
    # 5 splits are more than the KV blocks, and the steps, of most of these requests
    case = Case.make([1, 5, 0, 3], [7, 5, 9, 38])
    case.check(causal=causal, window=window, num_splits=num_splits, tile=SMALL)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("queries", [1, 3, 8])
def test_shares_around_a_tiles_end(queries: int, window: int) -> None:
    """Shares of old keys, of this step's, of both, and of none."""
    lengths = [queries + n for n in (0, 1, 12, 15, 16, 17, 29, 31, 32, 33, 47)]
    case = Case.make([queries] * len(lengths), lengths, heads=(2, 1))
    for num_splits in (2, 3):
        case.check(window=window, num_splits=num_splits, tile=SMALL)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (False, 0), (True, 6)])
def test_requests_of_several_tiles(causal: bool, window: int, num_splits: int) -> None:
    # tiles hold 8 queries: requests that fill one exactly, need three, have none
    case = Case.make([19, 8, 0, 1, 9], [50, 8, 4, 33, 9], heads=(2, 1))
    case.check(causal=causal, window=window, num_splits=num_splits, tile=SMALL)


@pytest.mark.parametrize("num_splits", [0, 65])
def test_more_splits_than_can_be_joined(num_splits: int) -> None:
    """One kernel joins those of all prefills: it would leave out what it has no place for."""
    with pytest.raises(ValueError, match=r"num_splits: .* not in \[1, 64\]"):
        Case.make([9], [40], heads=(2, 1)).kernel(scale=0.3, num_splits=num_splits)


@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (6, 2), (4, 1), (8, 1), (20, 1)])
def test_groups(heads: tuple[int, int]) -> None:
    case = Case.make([2, 3], [20, 11], heads=heads)
    case.check(tile=SMALL)
    case.check(num_splits=2)


@pytest.mark.parametrize("dim", [8, 32, 64, 80, 96, 128])
def test_head_dims(dim: int) -> None:
    Case.make([3, 1], [20, 40], heads=(2, 1), dim=dim).check(
        scale=dim**-0.5, num_splits=2, tile=SMALL
    )


@pytest.mark.parametrize("size", [1, 4, 16, 64])
@pytest.mark.parametrize("scattered", [True, False])
def test_kv_block_sizes(size: int, scattered: bool) -> None:
    case = Case.make([3, 9], [70, 20], heads=(2, 1), size=size, scattered=scattered)
    case.check(tile=SMALL)
    case.check(causal=False, window=20, num_splits=2)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=no_bfloat16)]
)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_dtypes(dtype: torch.dtype, num_splits: int) -> None:
    case = Case.make([4, 1, 10], [30, 9, 40], heads=(2, 1), dim=64, dtype=dtype)
    case.check(scale=0.125, num_splits=num_splits, tile=SMALL)
    case.check(scale=0.125, num_splits=num_splits)


def test_a_request_without_kv_gets_zeros() -> None:
    # a padded request of a graph: queries in the grid, nothing behind them
    case = Case.make([2, 2], [5, 0])
    for num_splits in (1, 3):
        out = case.kernel(scale=1.0, num_splits=num_splits)
        assert bool((out[2:] == 0).all())
        assert bool(out[:2].isfinite().all())


def test_equal_bits_run_to_run() -> None:
    case = Case.make([4, 1], [50, 20], heads=(2, 1))
    first, second = (case.kernel(scale=0.3, num_splits=5, tile=SMALL) for _ in range(2))
    assert torch.equal(first, second)


def test_no_tokens_and_no_requests() -> None:
    case = Case.make([0, 0], [5, 0])
    case.check()
    none = torch.zeros(0, 2, dtype=torch.int32, device=KERNEL_DEVICE)
    cu, q = none.new_zeros(1), torch.randn(2, 4, 32, device=KERNEL_DEVICE)
    k = torch.randn(4, 2, 32, device=KERNEL_DEVICE)
    out = paged_attention_triton(
        q, k, k, none, cu, none[:, 0], kv_block_size=4, max_query_len=0, scale=1.0
    )
    assert bool((out == 0).all())


def test_layouts_are_checked() -> None:
    x = torch.zeros(4, 2, 32, device=KERNEL_DEVICE)
    table = torch.zeros(1, 1, dtype=torch.int32, device=KERNEL_DEVICE)

    def run(q: torch.Tensor, v: torch.Tensor, size: int) -> None:
        cu = table.new_zeros(2)
        paged_attention_triton(
            q, x, v, table, cu, cu[:1], kv_block_size=size, max_query_len=1, scale=1.0
        )

    with pytest.raises(ValueError, match="q: the last dimension must be contiguous"):
        run(x.transpose(1, 2), x, 4)
    with pytest.raises(ValueError, match="v_cache: strides"):
        run(x, torch.zeros(4, 4, 32, device=KERNEL_DEVICE)[:, ::2], 4)
    with pytest.raises(ValueError, match="kv_block_size: 12 is not a power of two"):
        run(x, x, 12)


def test_splits_give_every_multiprocessor_a_program() -> None:
    assert choose_num_splits(8, 4096, 64, 132) == 16
    assert choose_num_splits(8, 1200, 64, 132) == 8  # few keys: not more than 8
    assert choose_num_splits(8, 300, 64, 132) == 5  # never less than a step each
    assert choose_num_splits(100, 4096, 64, 132) == 1
    assert choose_num_splits(512, 4096, 64, 132) == 1
    assert choose_num_splits(1, 10**6, 64, 132) == 64
    assert choose_num_splits(8, 0, 64, 132) == 1


def test_a_program_that_has_a_multiprocessor_to_itself_takes_large_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fewer, keys are shared out; with more, programs hide each other's waits."""
    monkeypatch.setattr(module.launch, "multiprocessors", lambda _: 132)
    shared = 227 << 10
    monkeypatch.setattr(module.launch, "shared_memory", lambda _: shared)
    x = torch.empty(0, 128, dtype=torch.bfloat16)
    keys = {n: choose_tile(x, 32, n).block_n for n in (8, 43, 44, 64, 132, 133, 264, 265, 2048)}
    assert keys == {8: 64, 43: 64, 44: 128, 64: 128, 132: 128, 133: 64, 264: 64, 265: 32, 2048: 32}
    assert choose_tile(x, 64, 64).block_n == 64
    shared = 99 << 10
    assert choose_tile(x, 32, 64).block_n == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.gpu
def test_every_tile_of_the_table(dtype: torch.dtype, dim: int) -> None:
    for queries, heads in ((1, (4, 4)), (8, (8, 2)), (8, (16, 2)), (300, (8, 2))):
        case = Case.make([queries, 1], [700, 401], heads=heads, dim=dim, size=16, dtype=dtype)
        assert choose_tile(torch.empty(0, dim, dtype=dtype), queries * heads[0] // heads[1], 1)
        for causal, num_splits in ((True, 1), (False, 1), (True, 4)):
            case.check(scale=dim**-0.5, causal=causal, num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 64, 256])
def test_large(size: int) -> None:
    lens = torch.randint(200, 2200, (48,)).tolist()
    case = Case.make([8] * 48, lens, heads=(32, 8), dim=128, size=size, dtype=torch.bfloat16)
    case.check(scale=128**-0.5)
    case.check(scale=128**-0.5, causal=False, window=512)
    case = Case.make(
        [1500, 3, 700], [1500, 900, 1800], heads=(8, 2), dim=128, size=size, dtype=torch.bfloat16
    )
    case.check(scale=128**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_one_captured_launch_serves_any_lengths(num_splits: int) -> None:
    # the graph is captured with every row empty; lengths and blocks change in place
    table = torch.zeros(3, 12, dtype=torch.int32, device="cuda")
    cu, seq_lens = table.new_zeros(4), table.new_zeros(3)
    static = Case.make([8, 8, 8], [40, 40, 40], dim=64)
    q, k, v = (torch.zeros_like(x, device="cuda") for x in (static.q, static.k, static.v))

    def run() -> torch.Tensor:
        return paged_attention_triton(
            *(q, k, v, table, cu, seq_lens),
            kv_block_size=4,
            max_query_len=8,
            scale=0.3,
            num_splits=num_splits,
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for query_lens, kv_lens in (([8, 8, 8], [40, 40, 40]), ([1, 8, 0], [7, 40, 0])):
        case = Case.make(query_lens, kv_lens, dim=64)
        tokens = case.q.shape[0]
        q[:tokens], k[: len(case.k)], v[: len(case.v)] = case.q, case.k, case.v
        table[:, : case.batch.block_table.shape[1]] = case.batch.block_table
        cu.copy_(case.batch.cu_seqlens_q)
        seq_lens.copy_(case.batch.seq_lens)
        graph.replay()
        low = paged_attention_ref(case.q, case.k, case.v, case.batch, scale=0.3)
        assert_as_good_as(out[:tokens], case.exact(0.3, True, 0), low, 4.0)
        assert bool((out[tokens - PADDING :] == 0).all())


@pytest.mark.gpu
def test_the_op_takes_the_kernels_on_cuda() -> None:
    case = Case.make([3, 1], [20, 9])
    b = case.batch
    batch = AttentionBatch(
        b.block_table,
        b.cu_seqlens_q,
        b.seq_lens,
        b.kv_block_size,
        (8, 8),  # on CUDA the host's lengths are upper bounds
        (64, 64),
        (),
    )
    out = paged_attention(case.q, case.k, case.v, batch, scale=0.3)
    low = paged_attention_ref(case.q, case.k, case.v, b, scale=0.3)
    assert_as_good_as(out, case.exact(0.3, True, 0), low, 4.0)
