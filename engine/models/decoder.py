"""Target networks: Llama, Qwen2 and Qwen3 as one decoder, told apart by flags of the spec."""

import torch

from engine.kernels.linear import Linear
from engine.kernels.paged_attention import AttentionBatch
from engine.kv.cache import PagedKV
from engine.models.config import TargetSpec
from engine.models.layers import (
    DecoderLayer,
    Embedding,
    Placement,
    StepContext,
    Weights,
    make_rope_table,
)
from engine.models.shard import Part


class Decoder:
    """A dense decoder-only language model over paged KV."""

    def __init__(
        self, spec: TargetSpec, weights: Weights, at: Placement, num_positions: int
    ) -> None:
        """Read the weights.

        Args:
            spec: The checkpoint's shape.
            weights: Tensors by Hugging Face names.
            at: Dtype and device to hold them in.
            num_positions: Positions that can be asked for: context plus the draft block.
        """
        self.spec = spec
        self._ranks = at.ranks
        layers = spec.layers
        vocab = (spec.vocab_size, layers.hidden_size)
        rows = at.share.even(spec.vocab_size, dim=0)

        def take(name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
            return weights.take(name, shape, dtype=at.dtype, device=at.device, part=part)

        self.embedding = Embedding(take("model.embed_tokens.weight", vocab, rows), at)
        self.layers = [
            DecoderLayer(layers, weights, f"model.layers.{i}.", at)
            for i in range(layers.num_layers)
        ]
        self.norm = take("model.norm.weight", (layers.hidden_size,))
        self.lm_head = Linear(
            self.embedding.weight if spec.tie_embeddings else take("lm_head.weight", vocab, rows)
        )
        self.rope = make_rope_table(layers, num_positions, at.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        kv: PagedKV,
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a ragged batch; K and V of every token are stored.

        Args:
            token_ids: [T] int64.
            positions: [T] int64.
            slots: [T] int64, KV slot of each token.
            attention: Requests of the batch.
            kv: The target's cache.
            taps: Which h[j] to return, ascending; h[0] = embeddings, no norm applied.

        Returns:
            Final-normed hidden states [T, H], and the taps side by side [T, len(taps) * H].
        """
        ctx = StepContext(self.rope[positions], slots, attention, kv)
        # right before the layers, whose kernels rely on that: see engine.kernels.launch
        stream = self.embedding(token_ids)
        tapped = []
        for i, layer in enumerate(self.layers):
            normed, before = layer.enter(stream)
            if i in taps:
                tapped.append(before)
            stream = layer(normed, before, ctx, i)
        hidden, after = stream.enter(self.norm, self.spec.layers.norm_eps, self._ranks)
        if len(self.layers) in taps:
            tapped.append(after)
        return hidden, torch.cat(tapped, dim=-1) if taps else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary, [T, V/N] rounded up, from hidden states [T, H]."""
        return self.lm_head(hidden)
