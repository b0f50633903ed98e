"""Windows, compressed entries and what chooses among them: kernels against references, in steps."""

import random

import pytest
import torch

from engine.kernels.compress import compress_ref, compress_triton
from engine.kernels.hc_mix import (
    MixWeights,
    hc_head_ref,
    hc_head_triton,
    hc_mix_ref,
    hc_mix_triton,
)
from engine.kernels.paged_attention import AttentionBatch, locate_kv
from engine.kernels.pair_rope import (
    pair_rope_ref,
    pair_rope_triton,
    yarn_frequencies,
)
from engine.kernels.rolling import (
    CompressedState,
    ring_store,
    ring_store_ref,
    ring_store_triton,
    spans,
    token_places,
)
from engine.kernels.rope import rope_table
from engine.kernels.select_entries import select_entries_ref, select_entries_triton
from engine.kernels.window_attention import window_attention_ref, window_attention_triton
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

DEVICE = torch.device(KERNEL_DEVICE)
SIZE, ROWS, PADDING = 8, 4, 2
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
pytestmark = pytest.mark.usefixtures("poison")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE)


class Steps:
    """Three requests in rows 2, 0 and 1, whose blocks lie between each other's."""

    def __init__(self) -> None:
        self.rows = [2, 0, 1]
        self.blocks = [list(range(i, 24, 3)) for i in range(3)]
        self.at = [0, 0, 0]

    def step(self, counts: list[int]) -> tuple[AttentionBatch, torch.Tensor]:
        """So many tokens each, and padding behind them; positions [T]."""
        starts, self.at = self.at, [a + n for a, n in zip(self.at, counts, strict=True)]
        table = torch.tensor(self.blocks, dtype=torch.int32, device=DEVICE)
        cu = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
        places = [p for s, n in zip(starts, counts, strict=True) for p in range(s, s + n)]
        batch = AttentionBatch(
            block_table=table,
            cu_seqlens_q=cu,
            seq_lens=torch.tensor(self.at, device=DEVICE).int(),
            kv_block_size=SIZE,
            query_lens=tuple(counts),
            kv_lens=tuple(self.at),
            kv_index=tuple(
                locate_kv(b, max(n, 1), SIZE, DEVICE)
                for b, n in zip(self.blocks, self.at, strict=True)
            ),
            rows=torch.tensor(self.rows, device=DEVICE),
        )
        return batch, torch.tensor([*places, *[0] * PADDING], device=DEVICE)


def rejecting(steps: Steps, kept: list[int], counts: list[int]) -> None:
    """Of the last step only so many tokens stay: nothing but positions moves."""
    steps.at = [a - n + k for a, n, k in zip(steps.at, counts, kept, strict=True)]


@needs_triton
@pytest.mark.parametrize(("ratio", "overlap", "width"), [(4, 2, 16), (8, 1, 32)])
def test_compressed_entries(ratio: int, overlap: int, width: int) -> None:
    """First windows, windows over several steps, rejected tokens, a chunk longer than the ring."""
    wide = overlap * width
    shape = (ROWS, overlap * ratio + 5, 2, wide)
    ours, want = (
        CompressedState(
            torch.full(shape, float("nan"), device=DEVICE),
            torch.full((24 * SIZE // ratio, width), float("nan"), device=DEVICE),
            ratio,
        )
        for _ in range(2)
    )
    norm = 1 + 0.2 * randn(width)
    rope = rope_table(yarn_frequencies(8, 10000.0), 80).to(DEVICE)
    steps, rng = Steps(), random.Random(1)
    for counts in ([30, 3, 0], [4, 5, 1], [5, 2, 22], [5, 5, 5], [1, 1, 3]):
        batch, positions = steps.step(counts)
        pairs = randn(sum(counts) + PADDING, 2, wide)
        pairs[sum(counts) :] = float("nan")
        given = (norm, 1e-6, rope, batch)
        places = token_places(batch, len(positions))
        compress_ref(pairs, want, *given)
        compress_triton(pairs, ours, *given, positions, places)
        torch.testing.assert_close(ours.entries, want.entries, equal_nan=True, **CLOSE)
        rows = [ours.rows[:-1], want.rows[:-1]]  # the last one takes what is not kept
        torch.testing.assert_close(*rows, atol=0, rtol=0, equal_nan=True)
        if max(counts) <= 5:
            rejecting(steps, [rng.randint(min(n, 1), n) for n in counts], counts)
    assert not ours.entries.isnan().all(dim=1).all()


@needs_triton
@pytest.mark.parametrize("kind", ["window", "heavy", "sparse", "draft"])
@pytest.mark.parametrize(("heads", "width"), [(4, 16), (20, 48)])
def test_attention(kind: str, heads: int, width: int) -> None:
    """Keys of the step, of rings that have gone round, entries all or chosen, draft blocks."""
    window, ratio = 6, 4
    ours, want = (torch.full((ROWS, window + 5, width), float("nan"), device=DEVICE) for _ in "ab")
    entries = CompressedState(randn(1), randn(24 * SIZE // ratio, width), ratio)
    sinks, steps = randn(heads), Steps()
    for counts in ([21, 1, 0], [4, 3, 2], [5, 5, 5]):
        batch, positions = steps.step(counts)
        num_tokens = len(positions)
        q, kv = randn(num_tokens, heads, width), randn(num_tokens, width)
        chosen = None
        if kind == "sparse":
            closed = (positions + 1) // ratio
            order = torch.rand(num_tokens, 3, device=DEVICE).argsort(dim=1)
            chosen = torch.where(order < closed[:, None], order, -1).int()
            if max(steps.at) // ratio > 3:  # not the first ones only
                chosen = torch.where(closed[:, None] > 3, closed[:, None] - 1 - order, chosen).int()
            chosen = chosen.sort(dim=1, descending=True).values
        how = {
            "window": window,
            "scale": width**-0.5,
            "compressed": None if kind in ("window", "draft") else entries,
            "chosen": chosen,
            "block": kind == "draft",
        }
        if kind == "draft":  # context is there from the first step on
            for ring in (ours, want):
                ring.nan_to_num_(0.5)
        places = token_places(batch, num_tokens)
        exact = window_attention_ref(q, kv, sinks, want, batch, **how)
        got = window_attention_triton(
            q, kv, sinks, ours, batch, positions=positions, at=places, **how
        )
        torch.testing.assert_close(got, exact, **CLOSE)
        assert not got[sum(counts) :].any(), "padding is 0"
        torch.testing.assert_close(ours[:-1], want[:-1], atol=0, rtol=0, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("heads", [3, 16])
def test_chosen_entries(heads: int) -> None:
    """Ties (most scores of three heads are 0) go to the earlier entry, here and there."""
    ratio, width, top_k = 4, 16, 3
    state = CompressedState(randn(1), randn(24 * SIZE // ratio, width), ratio)
    steps = Steps()
    for counts in ([34, 3, 0], [4, 3, 2], [5, 5, 17]):
        batch, positions = steps.step(counts)
        q, weights = randn(len(positions), heads, width), randn(len(positions), heads)
        places = token_places(batch, len(positions))
        want = select_entries_ref(q, weights, state, batch, top_k).entries
        got = select_entries_triton(q, weights, state, batch, top_k, positions, places).entries
        torch.testing.assert_close(got.sort(dim=1).values, want.sort(dim=1).values)
    # where nobody has more than may be chosen, all are, without scores
    got = select_entries_triton(q, weights, state, batch, 50, positions, places).entries
    want = select_entries_ref(q, weights, state, batch, 50).entries
    torch.testing.assert_close(got, want)


def test_where_tokens_belong() -> None:
    steps = Steps()
    steps.step([5, 0, 2])
    batch, positions = steps.step([2, 3, 1])
    at = token_places(batch, len(positions))
    assert at.row.tolist() == [2, 2, 0, 0, 0, 1, -1, -1]
    for span in spans(batch):
        for column, value in (("begin", span.begin), ("start", span.start), ("stop", span.stop)):
            assert (getattr(at, column)[span.tokens] == value).all()
    ring = torch.zeros(ROWS, 4, 1, device=DEVICE)
    live = torch.tensor([True, False, True, True, True, True, True, True], device=DEVICE)
    ring_store(ring, randn(8, 1).abs() + 1, positions, live, at)
    assert (ring[:3, :, 0] > 0).nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 2], [2, 1]]


@needs_triton
@pytest.mark.parametrize("some", [False, True])
def test_what_rings_keep(some: bool) -> None:
    """A chunk longer than the ring, no token, padding; all tokens or some of them."""
    steps = Steps()
    steps.step([5, 0, 2])
    batch, positions = steps.step([9, 3, 0])
    at = token_places(batch, len(positions))
    x, live = randn(len(positions), 2, 3), torch.rand(len(positions), device=DEVICE) < 0.5
    want, got = (torch.full((ROWS + 1, 4, 2, 3), float("nan"), device=DEVICE) for _ in "ab")
    for store, ring in ((ring_store_ref, want), (ring_store_triton, got)):
        store(ring, x, positions, live if some else None, at)
    torch.testing.assert_close(got[:-1], want[:-1], atol=0, rtol=0, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("inverse", [False, True])
def test_rope(inverse: bool) -> None:
    x = randn(5, 3, 24)
    rope = rope_table(yarn_frequencies(8, 100.0, factor=4.0, original_max_position=16), 40)
    turns = rope.to(DEVICE)[torch.tensor([0, 3, 9, 30, 39])]
    want = pair_rope_ref(x, turns, inverse=inverse)
    torch.testing.assert_close(pair_rope_triton(x, turns, inverse=inverse), want)
    torch.testing.assert_close(want[:, :, :16], x[:, :, :16], atol=0, rtol=0)


def test_rope_turns_back() -> None:
    x = randn(5, 3, 24)
    turns = rope_table(yarn_frequencies(8, 100.0), 40).to(DEVICE)[torch.arange(5) * 7]
    back = pair_rope_ref(pair_rope_ref(x, turns), turns, inverse=True)
    torch.testing.assert_close(back, x, **CLOSE)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 39])
def test_stream_coefficients(num_tokens: int, dtype: torch.dtype) -> None:
    """Parts that columns do not fill; rows with the same bits in any batch; float32 weights."""
    width, streams = 300, 4
    x = randn(num_tokens, streams, width).to(dtype)
    rows = streams * (streams + 2)
    how = {"norm_eps": 1e-6, "eps": 1e-6}
    weights = MixWeights(randn(rows, streams * width) / 30, randn(rows), randn(3))
    got = hc_mix_triton(x, weights, **how, iterations=20)
    for mine, want in zip(got, hc_mix_ref(x, weights, **how, iterations=20), strict=True):
        torch.testing.assert_close(mine, want, **CLOSE)
    one = hc_mix_triton(x[-1:], weights, **how, iterations=20)
    for mine, whole in zip(one, got, strict=True):
        # numpy, which multiplies in the interpreter, adds up in an order that depends on the row
        how_close = CLOSE if INTERPRETED else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(mine[0], whole[-1], **how_close)
    head = MixWeights(weights.fn[:streams].contiguous(), weights.base[:streams], weights.scale[:1])
    got_head = hc_head_triton(x, head, **how)
    torch.testing.assert_close(got_head, hc_head_ref(x, head, **how), **CLOSE)


def test_mixing_keeps_what_goes_through_the_streams() -> None:
    """Sinkhorn leaves rows and columns that sum to 1, columns first."""
    weights = MixWeights(randn(24, 40), randn(24), randn(3))
    _, _, comb = hc_mix_ref(randn(7, 4, 10), weights, norm_eps=1e-6, eps=1e-6, iterations=20)
    torch.testing.assert_close(comb.sum(1), torch.ones(7, 4, device=DEVICE), atol=1e-4, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(7, 4, device=DEVICE), atol=1e-2, rtol=0)
    _, _, once = hc_mix_ref(randn(7, 4, 10), weights, norm_eps=1e-6, eps=1e-6, iterations=1)
    torch.testing.assert_close(once.sum(1), torch.ones(7, 4, device=DEVICE), atol=1e-4, rtol=0)
