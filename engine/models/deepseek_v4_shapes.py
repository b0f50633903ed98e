"""DeepSeek-V4 shapes with made-up packed weights, for benchmarks.

    shape:deepseek-v4-flash      all 43 layers: some 167 GB with the drafter, two GPUs or more
    shape:deepseek-v4-flash-4    its first four layers, one of each kind and a window layer more
    shape:deepseek-v4-pro-4      the same slice of the larger model
    shape:deepseek-v4.1-flash    all 40 layers, without Engram: some 306 GB, four GPUs
    shape:deepseek-v4.1-flash-4  a window layer, a source of pairs, one of single tokens that finds
                                 blocks, and a layer that chooses inside them

Routed experts are fp4, attention, shared experts and the drafter's projection fp8, as released.
Scales make every product keep the spread of its input.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from engine.kernels.packed import FP4_GROUP, FP8_BLOCK
from engine.models.deepseek_v4_spec import (
    ExpertsSpec,
    HyperSpec,
    IndexerSpec,
    LayerKind,
    SourcesSpec,
    V4DraftSpec,
    V4Layers,
    V4TargetSpec,
    YarnRope,
)
from engine.models.shard import Part

_YARN = YarnRope(theta=1.6e5, factor=16.0, original_max_position=65536)
_STAGES, _GAMMA, _RANK = 3, 5, 256
_E2M1_RMS = 2.93
"""Of four random bits."""


def _flash_kinds(layers: int) -> tuple[LayerKind, ...]:
    more: list[LayerKind] = ["heavy" if i % 2 else "sparse" for i in range(layers - 2)]
    return ("window", "window", *more)


def _flash(layers: int) -> V4TargetSpec:
    return V4TargetSpec(
        architecture="DeepseekV4ForCausalLM",
        layers=V4Layers(
            kinds=_flash_kinds(layers),
            hashed=tuple(i < 3 for i in range(layers)),
            hidden_size=4096,
            num_heads=64,
            head_dim=512,
            rope_dim=64,
            q_rank=1024,
            o_groups=8,
            o_rank=1024,
            window=128,
            sparse_ratio=4,
            heavy_ratio=128,
            indexer=IndexerSpec(num_heads=64, head_dim=128, top_k=512),
            hyper=HyperSpec(num_streams=4, sinkhorn_iterations=20, eps=1e-6),
            experts=ExpertsSpec(num_experts=256, per_token=6, width=2048, scale=1.5, limit=10.0),
            norm_eps=1e-6,
            window_rope=YarnRope(theta=1e4),
            compressed_rope=_YARN,
        ),
        vocab_size=129280,
        max_position=32768,
        eos_token_ids=(1,),
        bos_token_id=0,
        dtype="bfloat16",
    )


def _pro(layers: int) -> V4TargetSpec:
    flash = _flash(layers)
    wider = replace(
        flash.layers,
        hidden_size=7168,
        num_heads=128,
        q_rank=1536,
        o_groups=16,
        indexer=IndexerSpec(num_heads=64, head_dim=128, top_k=1024),
        experts=ExpertsSpec(num_experts=384, per_token=6, width=3072, scale=2.5, limit=10.0),
    )
    return replace(flash, layers=wider)


def _flash_v41(sources: SourcesSpec) -> V4TargetSpec:
    """V4.1, without the two layers' Engram tables; what layers see as given."""
    flash = _flash(2)
    kinds: tuple[LayerKind, ...] = tuple("shared" if r else "window" for r in sources.ratios)
    other = replace(
        flash.layers,
        kinds=kinds,
        hashed=(False,) * len(kinds),
        hidden_size=5120,
        q_rank=1280,
        sparse_ratio=0,
        heavy_ratio=0,
        indexer=IndexerSpec(num_heads=32, head_dim=128, top_k=512),
        experts=ExpertsSpec(num_experts=384, per_token=6, width=2304, scale=1.5, limit=10.0),
        norm_eps=1e-20,
        delayed=True,
        q_head_norm=False,
        sources=sources,
    )
    return replace(flash, architecture="DeepseekV41ForCausalLM", layers=other, fp8_block=32)


_BLOCKS = {"candidate_blocks": 2048, "candidate_block_size": 8}
_SOURCES = SourcesSpec(
    ratios=(0, 0, *[2] * 18, *[1] * 20),
    entries=(2, 8, 14, 20),
    choices=(2, 8, 14, 20, 24, 28, 32, 36),
    candidates=20,
    **_BLOCKS,
)
_SLICE = SourcesSpec(
    ratios=(0, 2, 1, 1), entries=(1, 2), choices=(1, 2, 3), candidates=2, **_BLOCKS
)

V4_TARGETS = {
    "deepseek-v4-flash": _flash(43),
    "deepseek-v4-flash-4": _flash(4),
    "deepseek-v4-pro-4": _pro(4),
    "deepseek-v4.1-flash": _flash_v41(_SOURCES),
    "deepseek-v4.1-flash-4": _flash_v41(_SLICE),
}


def v4_draft(target: V4TargetSpec) -> V4DraftSpec:
    """The three-stage drafter of a target's shape, tapping its last layers."""
    window: LayerKind = "window"
    depth, shape, experts = target.layers.num_layers, target.layers, target.layers.experts
    if shape.delayed:  # V4.1's has experts of its own, and taps before its layers
        experts = replace(experts, num_experts=128, per_token=3)
    last = depth - 1 if shape.delayed else depth
    return V4DraftSpec(
        layers=replace(
            shape,
            kinds=(window,) * _STAGES,
            hashed=(False,) * _STAGES,
            sources=None,
            experts=experts,
        ),
        vocab_size=target.vocab_size,
        num_speculative_tokens=_GAMMA,
        mask_token_id=128799,
        taps=tuple(range(last - 2, last + 1)),
        num_target_layers=depth,
        markov_rank=_RANK,
        has_confidence=True,
        confidence_with_markov=True,
        max_position=target.max_position,
        dtype=target.dtype,
        fp8_block=target.fp8_block,
    )


_FP8 = re.compile(r".*\.(attn\.w(q_a|q_b|kv|o_a|o_b)|indexer\.wq_b|main_proj|shared_experts\.w\d)")
_FP4 = re.compile(r".*\.experts\.\d+\.w\d")


class RandomV4:
    """Weights made on the device as they are asked for, packed as released; norms are 1.

    A tensor is named by seed and name alone, so that ranks hold parts of the same network.

    Args:
        seed: The same one makes the same network.
        fp8_block: Rows and columns of fp8 that share a scale.
    """

    folder: Path | None = None

    def __init__(self, seed: int, fp8_block: int = FP8_BLOCK) -> None:
        self._seed, self._block = seed, fp8_block

    def has(self, name: str) -> bool:
        """Is there a tensor of this released name?"""
        base, _, leaf = name.rpartition(".")
        if name.startswith("model."):
            return False
        return leaf != "scale" or bool(_FP8.fullmatch(base) or _FP4.fullmatch(base))

    def stored(self, name: str) -> str:
        """As safetensors would spell its dtype."""
        return "I8" if _FP4.fullmatch(name.rpartition(".")[0]) else "F8_E4M3"

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        part: Part | None = None,
    ) -> torch.Tensor:
        """A tensor that is not packed."""
        held = shape if part is None else part.of(shape)
        if device.type == "meta":
            return torch.empty(held, dtype=dtype, device=device)
        if dtype == torch.int64:  # the experts of a token: different ones
            token = torch.arange(shape[0], device=device)[:, None]
            return (token * 7 + torch.arange(shape[1], device=device) * 37) % 256
        if "norm" in name or name.endswith("_scale"):
            return torch.ones(held, dtype=dtype, device=device)
        whole = torch.empty(shape, dtype=dtype, device=device)
        whole.normal_(0.0, shape[-1] ** -0.5, generator=self._generator(name, device))
        return whole if part is None else part.cut(whole).clone()

    def take_raw(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stored: Mapping[str, torch.dtype],
        device: torch.device,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Bytes of a packed tensor, or the one power of two that scales it."""
        fp4, is_scale = self.stored(name) == "I8", name.endswith(".scale")
        seen_as = torch.uint8 if fp4 or is_scale else torch.float8_e4m3fn
        held = shape if part is None else part.of(shape)
        if device.type == "meta":
            return torch.empty(held, dtype=seen_as, device=device)
        if is_scale:
            inputs = shape[1] * (FP4_GROUP if fp4 else self._block)
            power = math.log2(inputs**-0.5 / (_E2M1_RMS if fp4 else 1.0))
            return torch.full(held, 127 + round(power), dtype=torch.uint8, device=device)
        generator = self._generator(name, device)
        if fp4:
            whole = torch.empty(shape, dtype=torch.uint8, device=device)
            whole.random_(0, 256, generator=generator)
        else:
            numbers = torch.empty(shape, dtype=torch.bfloat16, device=device)
            whole = numbers.normal_(generator=generator).to(torch.float8_e4m3fn)
        if part is None:
            return whole
        # cut as bytes: not every op knows eight-bit floats
        return part.cut(whole.view(torch.uint8)).clone().view(seen_as)

    def _generator(self, name: str, device: torch.device) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        return generator
