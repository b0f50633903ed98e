"""paged_attention against a loop over every query and key, and step_inputs by hand."""

import math

import pytest
import torch

from engine.kernels.paged_attention import AttentionBatch, locate_kv, paged_attention
from engine.kernels.rope_store import kv_store_ref
from engine.kernels.step_inputs import step_inputs

SIZE = 4


def brute_force(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int
) -> torch.Tensor:
    """One request in float64, the mask written out as in the docstring's formula."""
    n, heads, _ = q.shape
    context = k.shape[0] - n
    out = torch.zeros_like(q, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            kv_head = h // (heads // k.shape[1])
            seen = [
                j
                for j in range(k.shape[0])
                if (not window or j >= context - window)
                and (j < context or not causal or j - context <= i)
            ]
            weights = [
                math.exp(scale * float(q[i, h].double() @ k[j, kv_head].double())) for j in seen
            ]
            for w, j in zip(weights, seen, strict=True):
                out[i, h] += w / sum(weights) * v[j, kv_head].double()
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("scattered", [True, False])
def test_matches_a_loop_over_keys(causal: bool, window: int, scattered: bool) -> None:
    query_lens, kv_lens = [1, 5, 3], [7, 5, 18]
    heads, kv_heads, dim = 6, 2, 8
    blocks = [[2, 3], [9, 0], [5, 1, 8, 7, 4]] if scattered else [[0, 1], [2, 3], [4, 5, 6, 7, 8]]
    k_cache, v_cache = torch.randn(2, 10 * SIZE, kv_heads, dim).unbind(0)
    q = torch.randn(sum(query_lens) + 2, heads, dim)
    batch = AttentionBatch(
        block_table=torch.zeros(3, 5, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 6, 9], dtype=torch.int32),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        kv_block_size=SIZE,
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        kv_index=tuple(
            locate_kv(b, n, SIZE, q.device) for b, n in zip(blocks, kv_lens, strict=True)
        ),
    )
    assert isinstance(batch.kv_index[2], slice) != scattered
    out = paged_attention(q, k_cache, v_cache, batch, scale=0.3, causal=causal, window=window)
    begin = 0
    for n, length, ids in zip(query_lens, kv_lens, blocks, strict=True):
        slots = [ids[j // SIZE] * SIZE + j % SIZE for j in range(length)]
        want = brute_force(
            q[begin : begin + n], k_cache[slots], v_cache[slots], 0.3, causal, window
        )
        torch.testing.assert_close(out[begin : begin + n].double(), want, atol=1e-5, rtol=0)
        begin += n
    assert float(out[begin:].abs().max()) == 0.0


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    k_cache, v_cache = torch.randn(2, 8 * SIZE, 2, 8).unbind(0)
    q = torch.randn(4, 4, 8)

    def run(queries: torch.Tensor, which: list[int]) -> torch.Tensor:
        lens = [(1, 9), (3, 11)]
        batch = AttentionBatch(
            torch.zeros(len(which), 4, dtype=torch.int32),
            torch.zeros(len(which) + 1, dtype=torch.int32),
            torch.zeros(len(which), dtype=torch.int32),
            SIZE,
            tuple(lens[i][0] for i in which),
            tuple(lens[i][1] for i in which),
            tuple(slice(16 * i, 16 * i + lens[i][1]) for i in which),
        )
        return paged_attention(queries, k_cache, v_cache, batch, scale=1.0)

    both = run(q, [0, 1])
    assert torch.equal(both[:1], run(q[:1], [0]))
    assert torch.equal(both[1:], run(q[1:], [1]))


def test_padding_writes_nothing() -> None:
    cache = torch.full((2, 6, 1, 2), 7.0)
    x = torch.randn(3, 1, 2)
    kv_store_ref(x, -x, cache[0], cache[1], torch.tensor([4, -1, 0]))
    assert torch.equal(cache[0][[4, 0]], x[[0, 2]])
    assert torch.equal(cache[1][[4, 0]], -x[[0, 2]])
    assert bool((cache[:, [1, 2, 3, 5]] == 7.0).all())


def test_step_inputs_by_hand() -> None:
    out = step_inputs(
        torch.tensor([50, 60]),
        torch.tensor([[51, 52], [61, 62]]),
        torch.tensor([4, 9]),
        torch.tensor([3, 1], dtype=torch.int32),
        4,
    )
    assert out.token_ids.tolist() == [50, 51, 52, 60]
    assert out.positions.tolist() == [4, 5, 6, 9]
    assert out.cu_seqlens_q.tolist() == [0, 3, 4]
