"""The DSpark draft network: context from the target's taps, one parallel block, a Markov chain."""

from collections.abc import Callable

import torch

from engine.kernels.linear import Linear
from engine.kernels.markov import Chain, MarkovWeights, markov_chain
from engine.kernels.norms import rms_norm
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.rope_store import rope_store
from engine.kernels.sampling import SamplingRows
from engine.kv.cache import PagedKV
from engine.models.config import DraftSpec
from engine.models.decoder import Decoder
from engine.models.layers import (
    DecoderLayer,
    Embedding,
    Placement,
    StepContext,
    Weights,
    make_rope_table,
)
from engine.models.shard import Part, Share


class Drafter:
    """Drafts G tokens a request from [anchor, mask, mask, ...]."""

    def __init__(
        self,
        spec: DraftSpec,
        weights: Weights,
        has: Callable[[str], bool],
        target: Decoder,
        at: Placement,
        num_positions: int,
    ) -> None:
        """Read the weights.

        Args:
            spec: The checkpoint's shape.
            weights: Tensors by DeepSpec names.
            has: Is there a tensor of this name?
            target: Lends its embedding and lm_head where the checkpoint has none.
            at: Dtype and device.
            num_positions: Positions that can be asked for: context plus the draft block.
        """
        self.spec = spec
        self._ranks = at.ranks
        layers, h = spec.layers, spec.layers.hidden_size

        def take(name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
            return weights.take(name, shape, dtype=at.dtype, device=at.device, part=part)

        self.fc = Linear(take("fc.weight", h, len(spec.taps) * spec.target_hidden_size))
        self.hidden_norm = take("hidden_norm.weight", h)
        self.layers = [
            DecoderLayer(layers, weights, f"layers.{i}.", at) for i in range(layers.num_layers)
        ]
        self.context_kv = self._take_context(take, at.share)
        self.norm = take("norm.weight", h)
        # rows of a draft vocabulary padded beyond the target's have nothing to say
        self.num_logits = min(spec.draft_vocab_size, spec.vocab_size)
        self.embedding = target.embedding
        if has("embed_tokens.weight"):
            rows = at.share.even(spec.vocab_size, dim=0)
            own = take("embed_tokens.weight", spec.vocab_size, h, part=rows)
            # most often a frozen copy: hold it once
            if not _same(own, target.embedding.weight):
                self.embedding = Embedding(own, at)
        self.lm_head = target.lm_head
        if has("lm_head.weight") or self.num_logits < spec.vocab_size:
            rows = at.share.even(self.num_logits, dim=0)
            head = take("lm_head.weight", spec.draft_vocab_size, h, part=rows)
            self.lm_head = self._own_lm_head(head, target)
        self.markov = self._take_markov(take)
        self.confidence_weight, self.confidence_bias = self._take_confidence(take)
        self.draft_to_target = None
        if self.num_logits < spec.vocab_size:
            offsets = weights.take(
                "d2t", (spec.draft_vocab_size,), dtype=torch.int64, device=at.device
            )
            self.draft_to_target = offsets + torch.arange(len(offsets), device=at.device)
        self.rope = make_rope_table(layers, num_positions, at.device)

    def _take_confidence(
        self, take: Callable[..., torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Projection and bias in float32, whatever the checkpoint stores."""
        spec = self.spec
        if not spec.has_confidence:
            return None, None
        width = spec.layers.hidden_size + (spec.markov_rank if spec.confidence_with_markov else 0)
        weight, bias = "confidence_head.proj.weight", "confidence_head.proj.bias"
        return take(weight, 1, width).float(), take(bias, 1).float()

    def _own_lm_head(self, weight: torch.Tensor, target: Decoder) -> Linear:
        """The checkpoint's head, or the target's where they are the same matrix."""
        theirs = target.embedding.weight if target.spec.tie_embeddings else target.lm_head.weight
        comparable = target.spec.tie_embeddings or not target.lm_head.packed
        if comparable and _same(weight, theirs):
            return target.lm_head
        return Linear(weight[: self.num_logits])

    def _take_context(self, take: Callable[..., torch.Tensor], share: Share) -> Linear:
        """K and V rows of all layers in one product: context needs no more of them."""
        spec = self.spec.layers
        rows, part = spec.num_kv_heads * spec.head_dim, share.heads(spec, "k", dim=0)
        weights, biases = [], []
        for layer in range(spec.num_layers):
            for name in (f"layers.{layer}.self_attn.{n}_proj." for n in "kv"):
                weights.append(take(name + "weight", rows, spec.hidden_size, part=part))
                if spec.qkv_bias:
                    biases.append(take(name + "bias", rows, part=part))
        return Linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _take_markov(self, take: Callable[..., torch.Tensor]) -> MarkovWeights:
        spec, h, r = self.spec, self.spec.layers.hidden_size, self.spec.markov_rank
        if spec.markov == "none":
            return MarkovWeights("none", None, None, None)
        inner = None
        if spec.markov == "gated":
            gate = "markov_head.gate_proj."
            inner = Linear(take(gate + "weight", r, h + r), take(gate + "bias", r))
        elif spec.markov == "rnn":
            joint = "markov_head.joint_proj."
            inner = Linear(take(joint + "weight", 3 * r, 2 * r + h), take(joint + "bias", 3 * r))
        return MarkovWeights(
            spec.markov,
            take("markov_head.markov_w1.weight", spec.vocab_size, r),
            Linear(
                take("markov_head.markov_w2.weight", spec.draft_vocab_size, r)[: self.num_logits]
            ),
            inner,
        )

    def store_context(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: PagedKV,
        batch: AttentionBatch,
    ) -> None:
        """Turn committed tokens into draft context.

        Args:
            taps: [T, A * target hidden], the target's h[j] of these tokens.
            positions: [T] int64, the tokens' own positions.
            slots: [T] int64; negative for rejected or padding tokens.
            kv: The draft's cache.
            batch: The tokens' requests; where context lies is in `slots`.
        """
        spec = self.spec.layers
        context = rms_norm(self.fc(taps), self.hidden_norm, spec.norm_eps)
        cos_sin = self.rope[positions]
        shape = len(positions), len(self.layers), -1, spec.head_dim
        heads = self.context_kv(context).view(shape)
        for i, layer in enumerate(self.layers):
            k_v, k_norm = heads[:, i], layer.attention.k_norm  # no query heads
            rope_store(k_v, None, k_norm, spec.norm_eps, cos_sin, kv.k[i], kv.v[i], slots)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        kv: PagedKV,
    ) -> torch.Tensor:
        """Run the draft blocks.

        Args:
            token_ids: [T] int64: per request its anchor, then mask tokens.
            positions: [T] int64.
            slots: [T] int64; the block's K and V lie where later context overwrites them.
            attention: Requests; each sees its context and its own block.
            kv: The draft's cache.

        Returns:
            Final-normed hidden states [T, H].
        """
        ctx = StepContext(self.rope[positions], slots, attention, kv)
        # right before the layers, whose kernels rely on that: see engine.kernels.launch
        stream = self.embedding(token_ids)
        for i, layer in enumerate(self.layers):
            stream = layer(
                *layer.enter(stream),
                ctx,
                i,
                causal=self.spec.causal[i],
                window=self.spec.windows[i],
            )
        return stream.enter(self.norm, self.spec.layers.norm_eps, self._ranks)[0]

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the draft vocabulary, [T, Vd/N] rounded up, from [T, H]."""
        return self.lm_head(hidden)

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
        """The Markov chain.

        Args:
            base: [R, G, Vd], base logits over the whole draft vocabulary.
            hidden: [R, G, H], rows that predict.
            anchors: [R] int64.
            params: R rows.
            positions: [R] int64, the anchors' positions.
            sampled: Is any temperature > 0?
        """
        return markov_chain(
            base,
            hidden,
            anchors,
            self.markov,
            self.draft_to_target,
            params,
            positions,
            sampled=sampled,
        )

    def confidence(self, hidden: torch.Tensor, chain: Chain) -> torch.Tensor | None:
        """Logits [R, G] float32 of P(draft k accepted | those before it); None without a head."""
        if self.confidence_weight is None or self.confidence_bias is None:
            return None
        features = hidden.float()
        if self.spec.confidence_with_markov:
            assert chain.prev_embeds is not None
            features = torch.cat((features, chain.prev_embeds.float()), dim=-1)
        return (features @ self.confidence_weight[0]) + self.confidence_bias


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values; what has no values yet is taken to differ."""
    return not a.is_meta and torch.equal(a, b)
