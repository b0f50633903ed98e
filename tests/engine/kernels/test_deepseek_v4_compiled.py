"""Kernels of DeepSeek-V4 compiled for compute capability 9.0 at its real widths, without a GPU.

DSPARK_FULL compiles them all; otherwise the one whose arithmetic is a promise.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels import hc_mix
from engine.kernels.compress import compress_triton, pool_triton
from engine.kernels.experts import ExpertMatrices, run_experts_triton
from engine.kernels.hc_collapse import hc_collapse_triton
from engine.kernels.hc_post import hc_post_triton
from engine.kernels.packed import Packed
from engine.kernels.packed_layout import lay_out
from engine.kernels.packed_linear import packed_linear_triton
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.pair_rope import pair_rope_triton
from engine.kernels.rolling import CompressedState, ring_store_triton, token_places
from engine.kernels.select_entries import Blocks, select_entries_triton
from engine.kernels.store_entries import store_entries_triton
from engine.kernels.window_attention import window_attention_triton
from tests.helpers.ahead import compiling
from tests.helpers.triton import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles; the interpreter does not")
full = pytest.mark.skipif("DSPARK_FULL" not in os.environ, reason="set DSPARK_FULL")
HIDDEN, STREAMS, TOKENS, BF16 = 4096, 4, 12, torch.bfloat16


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def fp8(*shape: int) -> Packed:
    *more, n, k = shape
    weight = zeros(*shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Packed("fp8", weight, zeros(*more, n // 128, k // 128, dtype=torch.uint8))


def fp4(*shape: int) -> Packed:
    *more, k = shape
    halves = zeros(*more, k // 2, dtype=torch.uint8)
    return Packed("fp4", halves, zeros(*more, k // 32, dtype=torch.uint8))


def test_the_collapse_rounds_products_and_sums_by_themselves(tmp_path: Path) -> None:
    """No fused multiply-add in the machine code, where it adds in float32."""
    with compiling(tmp_path) as made:
        x, pre = zeros(7, STREAMS, 5120, dtype=BF16), zeros(7, STREAMS)
        hc_collapse_triton(x, pre)
        hc_post_triton(x[:, 0], x, pre, zeros(7, STREAMS, STREAMS))
        for name in ("_hc_collapse_kernel", "_hc_post_kernel"):
            code = made.machine_code(name)
            assert "FADD" in code
            assert "FMUL" in code
            assert "FFMA" not in code, name


@full
def test_streams_and_rope(tmp_path: Path) -> None:
    with compiling(tmp_path) as made:
        x = zeros(TOKENS, STREAMS, HIDDEN, dtype=BF16)
        how = {"norm_eps": 1e-6, "eps": 1e-6}
        weights = hc_mix.MixWeights(zeros(24, STREAMS * HIDDEN), zeros(24), zeros(3))
        hc_mix.hc_mix_triton(x, weights, **how, iterations=20)
        head = hc_mix.MixWeights(zeros(4, STREAMS * HIDDEN), zeros(4), zeros(1))
        hc_mix.hc_head_triton(x, head, **how)
        for heads, width in ((64, 512), (1, 512), (64, 128)):
            pair_rope_triton(zeros(5, heads, width, dtype=BF16), zeros(5, 2, 32))
        assert len(made.kernels) == 3


def step() -> tuple[AttentionBatch, torch.Tensor]:
    batch = AttentionBatch(
        block_table=zeros(2, 32, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 6, 12], dtype=torch.int32),
        seq_lens=torch.tensor([206, 306], dtype=torch.int32),
        kv_block_size=128,
        query_lens=(6,),
        kv_lens=(32 * 128,),
        kv_index=(),
        rows=torch.tensor([0, 1]),
    )
    return batch, torch.arange(TOKENS)


@full
def test_windows_and_entries(tmp_path: Path) -> None:
    batch, positions = step()
    at = token_places(batch, TOKENS)
    with compiling(tmp_path) as made:
        states = {}
        for ratio, overlap, width in ((4, 2, 512), (128, 1, 512), (4, 2, 128)):
            wide = overlap * width
            rows = zeros(4, overlap * ratio + 6, 2, wide)
            state = CompressedState(rows, zeros(4096 // ratio, width, dtype=BF16), ratio)
            pairs, norm = zeros(TOKENS, 2, wide), zeros(width, dtype=BF16)
            compress_triton(pairs, state, norm, 1e-6, zeros(512, 2, 32), batch, positions, at)
            states[ratio, width] = state
        q = zeros(TOKENS, 64, 128, dtype=BF16)
        select_entries_triton(q, zeros(TOKENS, 64), states[4, 128], batch, 512, positions, at)
        for heads, dtype in ((64, BF16), (32, BF16), (64, torch.float32)):
            q, kv = zeros(TOKENS, heads, 512, dtype=dtype), zeros(TOKENS, 512, dtype=dtype)
            given: dict[str, Any] = {"positions": positions, "at": at, "window": 128}
            ring, sinks = zeros(4, 134, 512, dtype=dtype), zeros(heads)
            kept = {
                ratio: CompressedState(state.rows, state.entries.to(dtype), ratio)
                for (ratio, width), state in states.items()
                if width == 512
            }
            for more in (
                {},
                {"block": True},
                {"compressed": kept[128]},
                {
                    "compressed": kept[4],
                    "chosen": zeros(TOKENS, 512, dtype=torch.int32),
                },
            ):
                window_attention_triton(q, kv, sinks, ring, batch, scale=0.04, **given, **more)
        assert len(made.kernels) == 4


@full
def test_shared_entries(tmp_path: Path) -> None:
    """V4.1: entries of two tokens and of one, choices of both, inside 2048 blocks of 8, too."""
    batch, positions = step()
    at = token_places(batch, TOKENS)
    with compiling(tmp_path) as made:
        for ratio in (2, 1):
            for width in (512, 128):
                entries = zeros(4096 // ratio, width, dtype=BF16)
                rows = zeros(4, 8, 2, width if ratio > 1 else 0)
                state = CompressedState(rows, entries, ratio)
                x = zeros(TOKENS, width, dtype=BF16)
                store_entries_triton(x, state, zeros(512, 2, 32), batch, positions, at)
                if width == 128:
                    q, inside = zeros(TOKENS, 32, 128, dtype=BF16), zeros(TOKENS, 64).int()
                    given = (q, zeros(TOKENS, 32), state, batch, 512, positions, at)
                    for blocks in (None, Blocks(8, 64), Blocks(8, 64, inside)):
                        select_entries_triton(*given, blocks)
                    continue
                if ratio > 1:
                    pairs, norm = zeros(TOKENS, 2, width), zeros(width, dtype=BF16)
                    pool_triton(pairs, state, norm, 1e-20, batch, positions, at)
                window_attention_triton(
                    zeros(TOKENS, 64, 512, dtype=BF16),
                    zeros(TOKENS, 512, dtype=BF16),
                    zeros(64),
                    zeros(4, 134, 512, dtype=BF16),
                    batch,
                    positions=positions,
                    at=at,
                    window=128,
                    scale=0.04,
                    compressed=state,
                    chosen=zeros(TOKENS, 512, dtype=torch.int32),
                )
        # numbers of the last tokens, for n-grams
        ring_store_triton(zeros(4, 9).long(), positions, positions, None, at)
        assert len(made.kernels) == 5


@full
def test_packed_products_and_experts(tmp_path: Path) -> None:
    with compiling(tmp_path) as made:
        for rows in (1, 20, 900):
            packed_linear_triton(zeros(rows, HIDDEN, dtype=BF16), lay_out(fp8(1536, HIDDEN)))
        sizes = (8, 4096, HIDDEN), (8, HIDDEN, 2048)
        for kind in (fp8, fp4, lambda *s: zeros(*s, dtype=BF16)):
            gate_up, down = (ExpertMatrices(kind(*size)) for size in sizes)
            for tokens in (1, 900):
                experts = torch.arange(6).repeat(tokens, 1)
                x, weights = zeros(tokens, HIDDEN, dtype=BF16), zeros(tokens, 6)
                run_experts_triton(x, experts, weights, gate_up, down, first=0, limit=10.0)
        assert len(made.kernels) == 7
