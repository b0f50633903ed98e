"""What layers of DeepSeek-V4.1 see beside their windows: entries made, and chosen, for many.

A source makes of every window of `ratio` tokens a latent l, the norm of a mean that its gate
weighs by channel; of one token, of that token alone. The entry is l turned, the index key the
norm of W l, turned. Both lie in the source's state; a layer reads those of the last source at or
before it. Layers with an indexer choose entries for themselves and for those after them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.kernels.compress import pool
from engine.kernels.linear import Linear
from engine.kernels.norms import rms_norm
from engine.kernels.pair_rope import pair_rope
from engine.kernels.rolling import CompressedState
from engine.kernels.select_entries import Blocks, select_entries
from engine.kernels.store_entries import store_entries
from engine.kv.rolling import CompressorShape
from engine.models.deepseek_v4_spec import V4Layers
from engine.models.deepseek_v4_weights import V4Weights

if TYPE_CHECKING:
    from engine.models.deepseek_v4_layers import V4Step


@dataclass(slots=True)
class Handed:
    """What the layers of one forward leave for those after them."""

    chosen: torch.Tensor | None = None
    """[T, k] int32, the latest choice of entries."""

    inside: torch.Tensor | None = None
    """[T, B] int32, blocks that choices are made inside of; None: all there are."""


def shared_shapes(
    spec: V4Layers, layer: int
) -> tuple[CompressorShape | None, CompressorShape | None]:
    """Entries and index keys that a layer keeps: a source both, others nothing."""
    assert spec.sources is not None
    if layer not in spec.sources.entries:
        return None, None
    ratio = spec.ratio(layer)
    # a token is its own window; keys are made of latents: neither waits for others in a ring
    own = CompressorShape(ratio, 1 if ratio > 1 else 0, spec.head_dim)
    return own, CompressorShape(ratio, 0, spec.indexer.head_dim)


class LatentCompressor:
    """Tokens to latents."""

    def __init__(self, spec: V4Layers, ratio: int, weights: V4Weights, prefix: str) -> None:
        self.eps = spec.norm_eps
        h, d = spec.hidden_size, spec.head_dim
        self.norm = weights.take(f"{prefix}norm.weight", d)
        self.pairs = self.values = None
        if ratio > 1:
            # [ckpt] values and gates in float32, what becomes of them rounded before the norm
            self.pairs = weights.wide_matrix([f"{prefix}wkv", f"{prefix}wgate"], [d, d], h)
        else:
            self.values = weights.matrix([f"{prefix}wkv"], [d], h)

    def __call__(self, x: torch.Tensor, step: "V4Step", state: CompressedState) -> torch.Tensor:
        """[T, D] of [T, H], at the token that closes a window; keeps what open ones need."""
        if self.values is not None:
            return rms_norm(self.values(x), self.norm, self.eps)
        assert self.pairs is not None
        pairs = self.pairs(x).view(len(x), 2, -1)
        return pool(pairs, state, self.norm, self.eps, step.batch, step.positions, step.places)


class LatentKeys:
    """Latents to index keys."""

    def __init__(self, spec: V4Layers, weights: V4Weights, prefix: str) -> None:
        width = spec.indexer.head_dim
        self.eps = spec.norm_eps
        self.matrix = weights.matrix([f"{prefix}wk"], [width], spec.head_dim)
        self.norm = weights.take(f"{prefix}k_norm.weight", width)

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """[T, D] of the index from [T, D] of the attention, not turned."""
        return rms_norm(self.matrix(latents), self.norm, self.eps)


class SharedIndexer:
    """Chooses entries for its layer and those after it; every rank makes the same choice."""

    def __init__(self, spec: V4Layers, layer: int, weights: V4Weights, prefix: str) -> None:
        assert spec.sources is not None
        heads, width = spec.indexer.num_heads, spec.indexer.head_dim
        self.spec, self.sources = spec.indexer, spec.sources
        candidates = spec.sources.candidates
        self.finds = layer == candidates
        self.follows = candidates is not None and layer > candidates
        self.q = weights.matrix([f"{prefix}wq_b"], [heads * width], spec.q_rank)
        self.weigh = Linear(weights.take(f"{prefix}weights_proj.weight", heads, spec.hidden_size))

    def __call__(
        self, x: torch.Tensor, q_low: torch.Tensor, step: "V4Step", state: CompressedState
    ) -> None:
        """Hand on a choice, of input [T, H] and low-rank queries [T, q_rank]."""
        q = self.q(q_low).view(len(x), self.spec.num_heads, -1)
        q = pair_rope(q, step.compressed_turns)
        weights = self.weigh(x).float() * self.spec.num_heads**-0.5
        where = step.positions, step.places
        blocks, handed = self._blocks(step.handed), step.handed
        found = select_entries(q, weights, state, step.batch, self.spec.top_k, *where, blocks)
        handed.chosen = found.entries
        if self.finds:
            handed.inside = found.blocks

    def _blocks(self, handed: Handed) -> Blocks | None:
        size, count = self.sources.candidate_block_size, self.sources.candidate_blocks
        if self.finds:
            return Blocks(size, count)
        if self.follows and handed.inside is not None:
            return Blocks(size, count, handed.inside)
        return None


class SharedEntries:
    """The entries that one layer sees, and what it does for them."""

    def __init__(self, spec: V4Layers, layer: int, weights: V4Weights, prefix: str) -> None:
        """Read what the layer has of its own.

        Args:
            spec: The stack's shape.
            layer: Which of its layers.
            weights: Its tensors.
            prefix: E.g. `layers.2.attn.`.
        """
        assert spec.sources is not None
        self.source = spec.sources.entries_of(layer)
        self.compressor: LatentCompressor | None = None
        self.keys: LatentKeys | None = None
        self.indexer: SharedIndexer | None = None
        index = f"{prefix}indexer."
        if layer == self.source:
            ratio = spec.ratio(layer)
            self.compressor = LatentCompressor(spec, ratio, weights, f"{prefix}compressor.")
            self.keys = LatentKeys(spec, weights, index)
        if layer in spec.sources.choices:
            self.indexer = SharedIndexer(spec, layer, weights, index)

    def __call__(
        self, x: torch.Tensor, q_low: torch.Tensor, step: "V4Step"
    ) -> tuple[CompressedState, torch.Tensor]:
        """Entries, and which of them [T, k] int32, of input [T, H] and low-rank queries."""
        held = step.state.layers[self.source]
        assert held.compressed is not None
        assert held.index is not None
        if self.compressor is not None and self.keys is not None:
            # [ckpt] the released code rounds entries to four bits, and index keys and queries, too;
            # here they stay as they are, which is closer to what they are made of
            latents = self.compressor(x, step, held.compressed)
            where = step.ropes.compressed, step.batch, step.positions, step.places
            store_entries(latents, held.compressed, *where)
            store_entries(self.keys(latents), held.index, *where)
        if self.indexer is not None:
            self.indexer(x, q_low, step, held.index)
        chosen = step.handed.chosen
        assert chosen is not None
        return held.compressed, chosen
