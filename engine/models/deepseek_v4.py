"""The DeepSeek-V4 target: several residual streams, windows and compressed KV, experts."""

import torch

from engine.dist.collectives import Collectives
from engine.kernels.hc_collapse import hc_collapse
from engine.kernels.hc_mix import hc_head
from engine.kernels.linear import Linear
from engine.kernels.norms import rms_norm
from engine.kernels.paged_attention import AttentionBatch
from engine.kv.rolling import RollingState
from engine.models.deepseek_v4_layers import RopeTables, V4Block, V4Step, take_mix
from engine.models.deepseek_v4_spec import V4TargetSpec
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.layers import Embedding, Stream


class DeepseekV4:
    """A DeepSeek-V4 over rolling state; the interface is `engine.models.decoder.Decoder`'s."""

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
        self.head_mix = take_mix(layers, weights, "hc_head_", head=True)
        self.norm = weights.take("norm.weight", width)
        self.lm_head = Linear(weights.take("head.weight", vocab, width, part=rows))
        self.ropes = RopeTables(layers, num_positions, at.device)

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
            Final-normed hidden states [T, H], and the taps side by side [T, len(taps) * H].
        """
        spec = self.spec.layers
        step = V4Step(token_ids, positions, attention, kv, self.ropes)
        streams = spread(self.embedding(token_ids), spec.hyper.num_streams, self.ranks)
        tapped = []
        for i, (layer, state) in enumerate(zip(self.layers, kv.layers, strict=True)):
            if i in taps:
                tapped.append(tap(streams))
            streams = layer(streams, step, state)
        if len(self.layers) in taps:
            tapped.append(tap(streams))
        pre = hc_head(streams, self.head_mix, norm_eps=spec.norm_eps, eps=spec.hyper.eps)
        hidden = rms_norm(hc_collapse(streams, pre), self.norm, spec.norm_eps)
        return hidden, torch.cat(tapped, dim=-1) if taps else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary, [T, V/N] rounded up, from hidden states [T, H]."""
        return self.lm_head(hidden)


def spread(embedded: Stream, num_streams: int, ranks: Collectives) -> torch.Tensor:
    """Embeddings of [T] tokens, summed over ranks, as the first streams [T, S, H], all the same."""
    x = embedded.residual if embedded.delta is None else ranks.all_reduce(embedded.delta)
    return x[:, None].expand(-1, num_streams, -1).contiguous()


def tap(streams: torch.Tensor) -> torch.Tensor:
    """What a drafter learns of a token: the mean of its streams, [T, H] in their dtype."""
    return streams.float().mean(dim=1).to(streams.dtype)
