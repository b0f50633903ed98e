"""The DeepSeek-V4 target: several residual streams, windows and compressed KV, experts."""

import torch

from engine.dist.collectives import Collectives
from engine.dist.token_owners import TokenOwners
from engine.dist.token_shards import TokenShards
from engine.kernels.hc_mix import MixWeights, hc_head
from engine.kernels.linear import Linear
from engine.kernels.norms import rms_norm
from engine.kernels.paged_attention import AttentionBatch
from engine.kv.rolling import RollingState
from engine.models.deepseek_v4_layers import Residual, RopeTables, V4Block, V4Step, take_mix
from engine.models.deepseek_v4_spec import V4Layers, V4TargetSpec
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.deepseek_v41_engram import Engram, NgramRows
from engine.models.draft_tail import TailOrder, head_states
from engine.models.layers import Embedding, Stream


class DeepseekV4:
    """A DeepSeek-V4 over rolling state; the interface is `engine.models.decoder.Decoder`'s."""

    tail_order: TailOrder = "collapse first"

    def __init__(self, spec: V4TargetSpec, weights: V4Weights, num_positions: int) -> None:
        """Read the weights.

        Args:
            spec: The checkpoint's shape.
            weights: Its tensors.
            num_positions: Positions that can be asked for: context plus the draft block.
        """
        self.spec, at = spec, weights.at
        self.ranks = at.ranks
        layers, vocab = spec.layers, spec.vocab_size
        rows = at.share.even(vocab, dim=0)
        width = layers.hidden_size
        self.embedding = Embedding(weights.take("embed.weight", vocab, width, part=rows), at)
        self.layers = [
            V4Block(layers, i, weights, f"layers.{i}.", vocab) for i in range(layers.num_layers)
        ]
        self.engram, self.engrams = take_engram(spec, weights)
        self.head_mix = take_head(layers, weights, "hc_head_")
        self.norm = weights.take("norm.weight", width)
        self.lm_head = Linear(weights.take("head.weight", vocab, width, part=rows))
        self.ropes = RopeTables(layers, num_positions, at.device)
        self.shard_from = SHARD_FROM

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        kv: RollingState,
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a ragged batch; what its tokens leave behind is kept.

        Args:
            token_ids: [T] int64; those of padding choose experts, too.
            positions: [T] int64.
            slots: [T] int64; where tokens lie follows from `attention`.
            attention: Requests of the batch, with their rows.
            kv: The target's state.
            taps: Which h[j] to return, ascending: the mean over streams, no norm applied.

        Returns:
            Final-normed hidden states [T, H], and the taps side by side [T, len(taps) * H]; where
            ranks hold requests, taps of this rank's own [T', len(taps) * H].
        """
        spec = self.spec.layers
        shards = shard(attention, len(token_ids), self.ranks, self.shard_from)
        step = step_of(token_ids, positions, attention, kv, self.ropes, shards)
        residual = spread(self.embedding(token_ids), spec.hyper.num_streams, self.ranks, shards)
        tapped = []
        rows = None if self.engram is None else self.engram(step)
        for i, (layer, state) in enumerate(zip(self.layers, kv.layers, strict=True)):
            if i in self.engrams and rows is not None:
                streams = self.engrams[i](residual.streams, rows, shards)
                residual = Residual(streams, residual.pre)
            # [ckpt] taps see what tables feed, as the released code has it; they lie elsewhere
            if i in taps:
                tapped.append(tap(residual.streams, shards))
            residual = layer(residual, step, state)
        if len(self.layers) in taps:
            tapped.append(tap(residual.streams, shards))
        pre = end_of(residual, self.head_mix, spec)
        collapsed = head_states(residual.streams, pre, shards, self.tail_order)
        hidden = rms_norm(collapsed, self.norm, spec.norm_eps)
        return hidden, torch.cat(tapped, dim=-1) if taps else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary, [T, V/N] rounded up, from hidden states [T, H]."""
        return self.lm_head(hidden)


SHARD_FROM = 1024
"""Tokens of a step from which ranks hold the streams of their own tokens alone.

Sharded, a rank reads and writes 1/N of the streams, some 5.6 MB a token in 43 layers, and makes two
exchanges where it made one sum: by what NCCL takes, about even at so many tokens. Not measured yet.
"""


def shard(
    attention: AttentionBatch, num_tokens: int, ranks: Collectives, least: int
) -> TokenShards | TokenOwners | None:
    """Who holds which tokens' streams; the same on every rank."""
    if attention.own is not None:
        return TokenOwners(attention.own, ranks)
    if ranks.size == 1 or num_tokens < least:
        return None
    return TokenShards(num_tokens, ranks)


def step_of(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBatch,
    kv: RollingState,
    ropes: RopeTables,
    shards: TokenShards | TokenOwners | None,
    *,
    block: bool = False,
) -> V4Step:
    """What layers need, of the requests that this rank attends for."""
    if isinstance(shards, TokenOwners):
        positions, attention = shards.cut(positions), shards.part.batch
    return V4Step(token_ids, positions, attention, kv, ropes, block, shards)


def spread(
    embedded: Stream,
    num_streams: int,
    ranks: Collectives,
    shards: TokenShards | TokenOwners | None,
) -> Residual:
    """Embeddings of all tokens as the first streams [T, S, H] of this rank's, all the same."""
    if embedded.delta is None:
        x = embedded.residual
    elif shards is None:
        x = ranks.all_reduce(embedded.delta)
    else:
        x = shards.sum(embedded.delta)
    return Residual(x[:, None].expand(-1, num_streams, -1).contiguous())


def take_engram(
    spec: V4TargetSpec, weights: V4Weights
) -> tuple[NgramRows | None, dict[int, Engram]]:
    """What finds the rows of n-grams, and by layer what feeds them to the streams."""
    if spec.engram is None:
        return None, {}
    found = {
        layer: Engram(spec.engram, i, spec.layers, weights, f"layers.{layer}.engram.")
        for i, layer in enumerate(spec.engram.layers)
    }
    return NgramRows(spec.engram, spec.vocab_size, weights), found


def take_head(spec: V4Layers, weights: V4Weights, prefix: str) -> MixWeights | None:
    """What the end of a network collapses by; None where the last sublayer has said it."""
    return None if spec.delayed else take_mix(spec, weights, prefix, head=True)


def end_of(residual: Residual, weights: MixWeights | None, spec: V4Layers) -> torch.Tensor:
    """How the last streams collapse: [T, S] float32."""
    if weights is None:
        assert residual.pre is not None
        return residual.pre
    return hc_head(residual.streams, weights, norm_eps=spec.norm_eps, eps=spec.hyper.eps)


def tap(streams: torch.Tensor, shards: TokenShards | TokenOwners | None) -> torch.Tensor:
    """What a drafter learns of each token: the mean of its streams, [T, H] in their dtype."""
    mean = streams.float().mean(dim=1).to(streams.dtype)
    # draft context is kept where the request's other state is
    return shards.gather(mean) if isinstance(shards, TokenShards) else mean
