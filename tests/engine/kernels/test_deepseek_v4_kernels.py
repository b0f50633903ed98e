"""A whole DeepSeek-V4 with its drafter, through kernels: what references give."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.kernels.packed import pack
from engine.kernels.paged_attention import AttentionBatch, locate_kv
from engine.kv.rolling import RollingState
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_drafter import V4Drafter
from engine.models.deepseek_v4_layers import layer_shapes
from engine.models.deepseek_v4_spec import (
    ExpertsSpec,
    HyperSpec,
    IndexerSpec,
    SourcesSpec,
    V4DraftSpec,
    V4Layers,
    V4TargetSpec,
    YarnRope,
)
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.layers import Placement
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "rope_dim": 8,
    "q_rank": 16,
    "o_groups": 2,
    "o_rank": 8,
    "window": 6,
    "sparse_ratio": 4,
    "heavy_ratio": 8,
    "indexer": IndexerSpec(num_heads=16, head_dim=16, top_k=2),
    "hyper": HyperSpec(num_streams=4, sinkhorn_iterations=3, eps=1e-6),
    "experts": ExpertsSpec(num_experts=4, per_token=2, width=32, scale=1.5, limit=0.8),
    "norm_eps": 1e-6,
    "window_rope": YarnRope(theta=1e4),
    "compressed_rope": YarnRope(theta=1.6e5, factor=16.0, original_max_position=64),
}
VOCAB, GAMMA, SIZE = 48, 3, 8
TARGET = V4TargetSpec(
    architecture="DeepseekV4ForCausalLM",
    layers=V4Layers(kinds=("window", "sparse", "heavy"), hashed=(True, False, False), **LAYERS),
    vocab_size=VOCAB,
    max_position=128,
    eos_token_ids=(),
    bos_token_id=None,
    dtype="float32",
)
DRAFT = V4DraftSpec(
    layers=V4Layers(kinds=("window",) * 2, hashed=(False,) * 2, **LAYERS),
    vocab_size=VOCAB,
    num_speculative_tokens=GAMMA,
    mask_token_id=1,
    taps=(1, 3),
    num_target_layers=3,
    markov_rank=8,
    has_confidence=True,
    confidence_with_markov=True,
    max_position=128,
    dtype="float32",
)
# V4.1: a source of pairs, one of single tokens that finds blocks, one that chooses inside them
SOURCES = SourcesSpec(
    ratios=(2, 1, 1),
    entries=(0, 1),
    choices=(0, 1, 2),
    candidates=1,
    candidate_blocks=2,
    candidate_block_size=2,
)
SHARED = V4Layers(
    kinds=("shared",) * 3,
    hashed=(False,) * 3,
    delayed=True,
    q_head_norm=False,
    sources=SOURCES,
    **LAYERS,
)
PAIRS = {
    "V4": (TARGET, DRAFT),
    "V4.1": (
        replace(TARGET, layers=SHARED),
        replace(DRAFT, layers=replace(DRAFT.layers, delayed=True, q_head_norm=False)),
    ),
}


class Made:
    """Random tensors by name; routed experts of the target are fp4, its attention fp8."""

    def __init__(self) -> None:
        self._made: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        if not name.endswith(".scale"):
            return not name.startswith("model.")
        return ".experts." in name or name.startswith("layers.1.attn.wq_b")

    def stored(self, name: str) -> str:
        return "I8" if ".experts." in name else "F8_E4M3"

    def take(self, name: str, shape: tuple[int, ...], **more: Any) -> torch.Tensor:
        if more["dtype"] == torch.int64:
            ids = torch.arange(shape[0])[:, None].add(torch.arange(shape[1])) % 4
            return ids.to(KERNEL_DEVICE)
        generator = torch.Generator().manual_seed(len(name) * 7919 + sum(map(ord, name)))
        noise = torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith("scale"):
            return (1 + 0.2 * noise).to(KERNEL_DEVICE)
        return (noise * (0.4 if len(shape) == 1 else shape[-1] ** -0.5)).to(KERNEL_DEVICE)

    def take_raw(self, name: str, shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        base = name.rpartition(".")[0]
        fp4 = self.stored(name) == "I8"
        if name.endswith("weight"):
            whole = (shape[0], shape[1] * (2 if fp4 else 1))
            plain = self.take(f"{base}.weight", whole, dtype=torch.float32).cpu()
            packed = pack(plain, "fp4" if fp4 else "fp8")
            self._made[base] = packed.scale.to(KERNEL_DEVICE)
            return packed.weight.to(KERNEL_DEVICE)
        return self._made[base]


def build(target_spec: V4TargetSpec, draft: V4DraftSpec) -> tuple[DeepseekV4, V4Drafter]:
    made, at = Made(), Placement(torch.float32, torch.device(KERNEL_DEVICE))
    weights = V4Weights(made, made.has, at)
    target = DeepseekV4(target_spec, weights, 64)
    return target, V4Drafter(draft, weights, target, 64)


def play(version: str) -> list[torch.Tensor]:
    """Two requests: a prompt each, a draft, a verification of which one token stays, a draft."""
    target, draft = build(*PAIRS[version])
    device = torch.device(KERNEL_DEVICE)
    made: dict[str, Any] = {"dtype": torch.float32, "device": device}
    states = [
        RollingState.allocate(layer_shapes(spec.layers), 3, 8, SIZE, GAMMA + 1, **made)
        for spec in PAIRS[version]
    ]
    blocks, out = [[3, 1, 6], [0, 2, 4]], list[torch.Tensor]()

    def batch(starts: list[int], counts: list[int]) -> tuple[AttentionBatch, torch.Tensor]:
        stops = [s + n for s, n in zip(starts, counts, strict=True)]
        places = [p for s, e in zip(starts, stops, strict=True) for p in range(s, e)]
        found = AttentionBatch(
            block_table=torch.tensor(blocks, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, *counts], device=device).cumsum(0).int(),
            seq_lens=torch.tensor(stops, device=device).int(),
            kv_block_size=SIZE,
            query_lens=tuple(counts),
            kv_lens=tuple(stops),
            kv_index=tuple(
                locate_kv(b, n, SIZE, device) for b, n in zip(blocks, stops, strict=True)
            ),
            rows=torch.tensor([1, 0], device=device),
        )
        return found, torch.tensor(places, device=device)

    def feed(starts: list[int], counts: list[int], kept: list[int]) -> None:
        where, places = batch(starts, counts)
        ids = (places * 13 + 5) % VOCAB
        hidden, taps = target.forward(ids, places, places, where, states[0], DRAFT.taps)
        assert taps is not None
        live = [i < k for n, k in zip(counts, kept, strict=True) for i in range(n)]
        slots = torch.where(torch.tensor(live, device=device), places, -1)
        draft.store_context(taps, places, slots, states[1], where)
        out.append(target.logits(hidden))

    def propose(starts: list[int]) -> None:
        where, places = batch(starts, [GAMMA, GAMMA])
        ids = torch.full((2, GAMMA), 1, device=device)
        ids[:, 0] = torch.tensor([7, 9], device=device)
        hidden = draft.forward(ids.flatten(), places, places, where, states[1])
        out.extend((hidden, draft.base_logits(hidden)))

    feed([0, 0], [8, 3], [8, 3])
    feed([8, 3], [4, 2], [1, 2])
    propose([9, 5])
    return out


@contextmanager
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU: ops look at where tensors are."""
    with monkeypatch.context() as patch:
        if INTERPRETED:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        yield


@needs_triton
@pytest.mark.skipif(
    INTERPRETED and "DSPARK_FULL" not in os.environ,
    reason="seconds, interpreted, and ops are tested one by one: set DSPARK_FULL",
)
@pytest.mark.parametrize("version", PAIRS)
def test_a_round_through_kernels(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, draft context, draft blocks, a rejection, packed weights: all ops together."""
    with torch.inference_mode():
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", False, raising=False)
            want = play(version)
        with kernels(monkeypatch):
            got = play(version)
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine, exact, atol=2e-5, rtol=1e-5)
