"""The DSpark drafter of a DeepSeek-V4 checkpoint: V4 blocks over a window of draft context.

Context of a committed token is a key a stage, made of the target's taps. A draft block sees the
last keys before it, from the same first one on in every row, and all of itself. Its own keys are
not kept: when its tokens are committed they become context by way of their taps.
"""

import torch

from engine.kernels.linear import Linear
from engine.kernels.markov import Chain, MarkovWeights, markov_chain
from engine.kernels.norms import rms_norm
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.rolling import ring_store, token_places
from engine.kernels.sampling import SamplingRows
from engine.kv.rolling import RollingState
from engine.models.deepseek_v4 import DeepseekV4, end_of, shard, spread, step_of, take_head
from engine.models.deepseek_v4_layers import RopeTables, V4Block
from engine.models.deepseek_v4_spec import V4DraftSpec
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.draft_tail import TailOrder, head_states


class V4Drafter:
    """Drafts G tokens a request; the interface is `engine.models.drafter.Drafter`'s."""

    draft_to_target: torch.Tensor | None = None
    tail_order: TailOrder = "collapse first"

    def __init__(
        self, spec: V4DraftSpec, weights: V4Weights, target: DeepseekV4, num_positions: int
    ) -> None:
        """Read the weights.

        Args:
            spec: The checkpoint's shape.
            weights: Its tensors.
            target: Lends its embedding and lm_head.
            num_positions: Positions that can be asked for: context plus the draft block.
        """
        self.spec, self.ranks = spec, weights.at.ranks
        layers, h = spec.layers, spec.layers.hidden_size
        stages = range(layers.num_layers)
        last = f"mtp.{stages[-1]}."
        self.fc = weights.matrix(["mtp.0.main_proj"], [h], len(spec.taps) * h)
        self.context_norm = weights.take("mtp.0.main_norm.weight", h)
        self.layers = [V4Block(layers, i, weights, f"mtp.{i}.", spec.vocab_size) for i in stages]
        keys = [f"mtp.{i}.attn.wkv" for i in stages]
        self.context_kv = weights.matrix(keys, [layers.head_dim] * len(keys), h)
        self.head_mix = take_head(layers, weights, f"{last}hc_head_")
        self.norm = weights.take(f"{last}norm.weight", h)
        self.embedding, self.lm_head = target.embedding, target.lm_head
        self.num_logits = spec.vocab_size
        self.markov = self._take_markov(weights, f"{last}markov_head.")
        self.confidence_weight: torch.Tensor | None = None
        if spec.has_confidence:
            width = h + (spec.markov_rank if spec.confidence_with_markov else 0)
            self.confidence_weight = weights.wide(f"{last}confidence_head.proj.weight", 1, width)
        self.ropes = RopeTables(layers, num_positions, weights.at.device)
        self.shard_from = target.shard_from

    def _take_markov(self, weights: V4Weights, prefix: str) -> MarkovWeights:
        """In V4 `markov_w1` and `markov_w2`, in V4.1 `embed` and `head`."""
        old = weights.has(f"{prefix}markov_w1.weight")
        names = ("markov_w1", "markov_w2") if old else ("embed", "head")
        vocab, rank = self.spec.vocab_size, self.spec.markov_rank
        w1, w2 = (weights.take(f"{prefix}{n}.weight", vocab, rank) for n in names)
        return MarkovWeights("vanilla", w1, Linear(w2), None)

    def store_context(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: RollingState,
        batch: AttentionBatch,
    ) -> None:
        """Turn committed tokens into draft context.

        Args:
            taps: [T, A * H], the target's h[j] of these tokens; where ranks hold requests, of this
                rank's own alone.
            positions: [T] int64, the tokens' own positions.
            slots: [T] int64; negative for rejected or padding tokens.
            kv: The draft's state.
            batch: The tokens' requests.
        """
        if batch.own is not None:
            own = batch.own
            positions, slots, batch = own.cut(positions), own.cut(slots), own.batch
        spec = self.spec.layers
        context = rms_norm(self.fc(taps), self.context_norm, spec.norm_eps)
        keys = self.context_kv(context).split(spec.head_dim, dim=1)
        turns, at = self.ropes.window[positions], token_places(batch, len(positions))
        for layer, key, state in zip(self.layers, keys, kv.layers, strict=True):
            turned = layer.attention.keys(key, turns)
            ring_store(state.window, turned, positions, slots >= 0, at)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        kv: RollingState,
    ) -> torch.Tensor:
        """Run the draft blocks.

        Args:
            token_ids: [T] int64: per request its anchor, then mask tokens.
            positions: [T] int64.
            slots: [T] int64; the block keeps nothing.
            attention: Requests; each sees its context and its own block.
            kv: The draft's state.

        Returns:
            Collapsed hidden states [T, H], not normed: so the confidence head reads them.
        """
        spec = self.spec.layers
        shards = shard(attention, len(token_ids), self.ranks, self.shard_from)
        step = step_of(token_ids, positions, attention, kv, self.ropes, shards, block=True)
        residual = spread(self.embedding(token_ids), spec.hyper.num_streams, self.ranks, shards)
        for layer, state in zip(self.layers, kv.layers, strict=True):
            residual = layer(residual, step, state)
        pre = end_of(residual, self.head_mix, spec)
        return head_states(residual.streams, pre, shards, self.tail_order)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary, [T, V/N] rounded up, from [T, H] not normed."""
        return self.lm_head(rms_norm(hidden, self.norm, self.spec.layers.norm_eps))

    def chain(
        self,
        base: torch.Tensor,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        params: SamplingRows,
        positions: torch.Tensor,
        *,
        sampled: bool,
    ) -> Chain:
        """The Markov chain: base logits [R, G, V], hidden [R, G, H], anchors and positions [R]."""
        return markov_chain(
            base, hidden, anchors, self.markov, None, params, positions, sampled=sampled
        )

    def confidence(self, hidden: torch.Tensor, chain: Chain) -> torch.Tensor | None:
        """Logits [R, G] float32 of P(draft k accepted | those before it); None without a head."""
        if self.confidence_weight is None:
            return None
        features = hidden.float()
        if self.spec.confidence_with_markov:
            assert chain.prev_embeds is not None
            features = torch.cat((features, chain.prev_embeds.float()), dim=-1)
        return features @ self.confidence_weight[0]
