"""DeepSeek-V4 blocks, of target and drafter: attention, experts, and the streams around them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from engine.dist.token_owners import TokenOwners
from engine.dist.token_shards import TokenShards
from engine.kernels.compress import compress
from engine.kernels.cut_silu import cut_silu
from engine.kernels.experts import run_experts
from engine.kernels.hc_collapse import hc_collapse
from engine.kernels.hc_mix import MixWeights, hc_mix
from engine.kernels.hc_post import hc_post
from engine.kernels.linear import Linear
from engine.kernels.norms import rms_norm
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.pair_rope import pair_rope, yarn_frequencies
from engine.kernels.rolling import CompressedState, TokenPlaces, token_places
from engine.kernels.rope import rope_table
from engine.kernels.router import route
from engine.kernels.select_entries import select_entries
from engine.kernels.window_attention import window_attention
from engine.kv.rolling import CompressorShape, LayerShape, LayerState, RollingState
from engine.models.deepseek_v4_spec import V4Layers, YarnRope
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.deepseek_v41_layers import Handed, SharedEntries, shared_shapes


def layer_shapes(spec: V4Layers) -> tuple[LayerShape, ...]:
    """What each layer keeps of a request."""
    shapes = []
    for i, kind in enumerate(spec.kinds):
        ratio = spec.ratio(i)
        if kind == "shared":
            shapes.append(LayerShape(spec.window, spec.head_dim, *shared_shapes(spec, i)))
            continue
        # sparse layers' windows overlap, heavy ones' do not
        overlap = 2 if kind == "sparse" else 1
        own = None if kind == "window" else CompressorShape(ratio, overlap, spec.head_dim)
        keys = CompressorShape(ratio, overlap, spec.indexer.head_dim) if kind == "sparse" else None
        shapes.append(LayerShape(spec.window, spec.head_dim, own, keys))
    return tuple(shapes)


def dealt_numbers(spec: V4Layers) -> int:
    """Numbers of attention's weights that ranks deal where they share its heads."""
    heads, low = spec.num_heads * spec.head_dim, spec.o_groups * spec.o_rank
    return spec.num_layers * (heads * (spec.q_rank + spec.o_rank) + spec.hidden_size * low)


class RopeTables:
    """Cosines and sines of a stack's two ropes, by position."""

    def __init__(self, spec: V4Layers, num_positions: int, device: torch.device) -> None:
        def table(rope: YarnRope) -> torch.Tensor:
            inv = yarn_frequencies(
                spec.rope_dim,
                rope.theta,
                factor=rope.factor,
                original_max_position=rope.original_max_position,
                beta_fast=rope.beta_fast,
                beta_slow=rope.beta_slow,
            )
            return rope_table(inv, num_positions).to(device)

        self.window = table(spec.window_rope)
        """[positions, 2, rope_dim / 2] float32."""

        self.compressed = (
            table(spec.compressed_rope)
            if any(kind != "window" for kind in spec.kinds)
            else self.window
        )


@dataclass(frozen=True)
class V4Step:
    """What every layer of one forward needs. T tokens; where ranks hold requests, T' own ones."""

    token_ids: torch.Tensor  # [T] int64, of the whole batch: experts see all of it
    positions: torch.Tensor  # [T] int64
    batch: AttentionBatch
    state: RollingState
    ropes: RopeTables
    block: bool = False
    """Are these draft blocks?"""

    shards: TokenShards | TokenOwners | None = None
    """Who holds which tokens' streams; None: every rank all of them."""

    handed: Handed = field(default_factory=Handed)
    """What layers leave for those after them."""

    @cached_property
    def places(self) -> TokenPlaces | None:
        """Where tokens belong, for kernels; references find it in the batch."""
        if not self.positions.is_cuda:
            return None
        return token_places(self.batch, len(self.positions))

    @cached_property
    def window_turns(self) -> torch.Tensor:
        """[T, 2, P], of layers that see their window alone."""
        return self.ropes.window[self.positions]

    @cached_property
    def compressed_turns(self) -> torch.Tensor:
        """[T, 2, P], of all others."""
        return self.ropes.compressed[self.positions]


class Compressor:
    """Values and scores of tokens, and the norm of the entries they become."""

    def __init__(
        self, shape: CompressorShape, hidden: int, weights: V4Weights, prefix: str
    ) -> None:
        wide = shape.overlap * shape.width
        names = [f"{prefix}wkv", f"{prefix}wgate"]
        self.pairs = weights.wide_matrix(names, [wide, wide], hidden)
        self.bias = weights.wide(f"{prefix}ape", shape.ratio, wide)
        self.norm = weights.take(f"{prefix}norm.weight", shape.width)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, state: CompressedState
    ) -> torch.Tensor:
        """[T, 2, W] float32 of [T, H]."""
        pairs = self.pairs(x).view(len(x), 2, -1)
        pairs[:, 1] += self.bias[positions % state.ratio]
        return pairs


class Indexer:
    """Chooses the entries of a sparse layer; every rank makes the same choice."""

    def __init__(self, spec: V4Layers, weights: V4Weights, prefix: str) -> None:
        heads, width = spec.indexer.num_heads, spec.indexer.head_dim
        self.spec = spec.indexer
        self.q = weights.matrix([f"{prefix}wq_b"], [heads * width], spec.q_rank)
        self.weigh = Linear(weights.take(f"{prefix}weights_proj.weight", heads, spec.hidden_size))
        shape = CompressorShape(spec.sparse_ratio, 2, width)
        self.compressor = Compressor(shape, spec.hidden_size, weights, f"{prefix}compressor.")

    def __call__(
        self, x: torch.Tensor, q_low: torch.Tensor, step: V4Step, state: CompressedState
    ) -> torch.Tensor:
        """[T, k] int32 entries, of input [T, H] and low-rank queries [T, q_rank]."""
        q = self.q(q_low).view(len(x), self.spec.num_heads, -1)
        q = pair_rope(q, step.compressed_turns)
        weights = self.weigh(x).float() * self.spec.num_heads**-0.5
        where = step.positions, step.places
        return select_entries(q, weights, state, step.batch, self.spec.top_k, *where).entries


class V4Attention:
    """Low-rank queries, one K that is V, a window, compressed entries, a grouped output."""

    def __init__(self, spec: V4Layers, layer: int, weights: V4Weights, prefix: str) -> None:
        """Read this rank's heads, and what all ranks hold."""
        at = weights.at
        self.spec, self.kind = spec, spec.kinds[layer]
        h, d, size = spec.hidden_size, spec.head_dim, at.ranks.size
        self.heads, self.groups = spec.num_heads // size, spec.o_groups // size
        rows, low = spec.num_heads * d, spec.o_groups * spec.o_rank

        low_names = [f"{prefix}wq_a", f"{prefix}wkv"]
        self.low = weights.matrix(low_names, [spec.q_rank, d], h)
        self.q = weights.matrix([f"{prefix}wq_b"], [rows], spec.q_rank, dim=0)
        self.q_norm = weights.take(f"{prefix}q_norm.weight", spec.q_rank)
        self.kv_norm = weights.take(f"{prefix}kv_norm.weight", d)
        self.one = torch.ones(d, dtype=at.dtype, device=at.device)
        dealt = at.share.even(spec.num_heads, dim=0)
        self.sinks = weights.wide(f"{prefix}attn_sink", spec.num_heads, part=dealt)
        wide = rows // spec.o_groups
        self.o_low = weights.grouped(f"{prefix}wo_a", spec.o_groups, spec.o_rank, wide)
        self.o = weights.matrix([f"{prefix}wo_b"], [h], low, dim=1)
        self.compressor = self.indexer = self.shared = None
        shape = layer_shapes(spec)[layer].compressed
        if self.kind == "shared":
            self.shared = SharedEntries(spec, layer, weights, prefix)
        elif shape is not None:
            self.compressor = Compressor(shape, h, weights, f"{prefix}compressor.")
        if self.kind == "sparse":
            self.indexer = Indexer(spec, weights, f"{prefix}indexer.")

    def keys(self, kv: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """[T, D] as they are kept, normed and turned."""
        return pair_rope(rms_norm(kv, self.kv_norm, self.spec.norm_eps)[:, None], turns)[:, 0]

    def __call__(self, x: torch.Tensor, step: V4Step, state: LayerState) -> torch.Tensor:
        """[T, H] normed input to this rank's part of [T, H]; keeps this layer's keys."""
        spec = self.spec
        turns = step.window_turns if self.kind == "window" else step.compressed_turns
        q_low, kv = self.low(x).split((spec.q_rank, spec.head_dim), dim=1)
        q_low = rms_norm(q_low, self.q_norm, spec.norm_eps)
        q = self.q(q_low).view(len(x), self.heads, spec.head_dim)
        q = rms_norm(q, self.one, spec.norm_eps) if spec.q_head_norm else q
        q = pair_rope(q, turns)
        entries, chosen = self._compress(x, q_low, step, state)
        out = window_attention(
            q,
            self.keys(kv, turns),
            self.sinks,
            state.window,
            step.batch,
            window=spec.window,
            scale=spec.head_dim**-0.5,
            positions=step.positions,
            at=step.places,
            compressed=entries,
            chosen=chosen,
            block=step.block,
        )
        # values carry their keys' rotation: turned back at the query, its distance is left
        out = pair_rope(out, turns, inverse=True).reshape(len(x), self.groups, -1)
        return self.o(self.o_low(out))

    def _compress(
        self, x: torch.Tensor, q_low: torch.Tensor, step: V4Step, state: LayerState
    ) -> tuple[CompressedState | None, torch.Tensor | None]:
        """Close windows, main and index; the entries to see, and which of them, if not all."""
        if self.shared is not None:
            return self.shared(x, q_low, step)
        if self.compressor is None or state.compressed is None:
            return None, None
        self._close(self.compressor, x, step, state.compressed)
        if self.indexer is None or state.index is None:
            return state.compressed, None
        self._close(self.indexer.compressor, x, step, state.index)
        return state.compressed, self.indexer(x, q_low, step, state.index)

    def _close(
        self, compressor: Compressor, x: torch.Tensor, step: V4Step, state: CompressedState
    ) -> None:
        pairs = compressor(x, step.positions, state)
        eps, rope = self.spec.norm_eps, step.ropes.compressed
        where = step.batch, step.positions, step.places
        compress(pairs, state, compressor.norm, eps, rope, *where)


class V4Experts:
    """Routed experts, dealt to ranks whole, and one that every token goes through, by columns."""

    def __init__(
        self, spec: V4Layers, layer: int, weights: V4Weights, prefix: str, vocab_size: int
    ) -> None:
        """Read this rank's experts.

        Args:
            spec: The stack's shape.
            layer: Which of its layers.
            weights: Its tensors.
            prefix: E.g. `layers.0.ffn.`.
            vocab_size: Rows of the table of a layer whose experts are looked up.
        """
        e, h, share = spec.experts, spec.hidden_size, weights.at.share
        self.spec = e
        self.gate = weights.wide_matrix([f"{prefix}gate"], [e.num_experts], h)
        self.bias = self.table = None
        if spec.hashed[layer]:
            name = f"{prefix}gate.tid2eid"
            self.table = weights.numbers(name, vocab_size, e.per_token, below=e.num_experts)
        else:
            self.bias = weights.wide(f"{prefix}gate.bias", e.num_experts)
        dealt = share.even(e.num_experts, dim=0)
        self.first = 0 if dealt is None else dealt.start
        found = weights.experts(f"{prefix}experts.", e.num_experts, e.width, h, dealt)
        self.gate_up, self.down = found
        shared = f"{prefix}shared_experts."
        into = [f"{shared}w1", f"{shared}w3"]
        self.shared_in = weights.matrix(into, [e.width, e.width], h, dim=0)
        self.shared_out = weights.matrix([f"{shared}w2"], [h], e.width, dim=1)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, H] normed input to this rank's part of [T, H]."""
        experts, weights = route(
            self.gate(x),
            token_ids,
            bias=self.bias,
            table=self.table,
            per_token=self.spec.per_token,
            scale=self.spec.scale,
        )
        limit, among = self.spec.limit, self.spec.num_experts
        held = self.gate_up, self.down
        routed = run_experts(x, experts, weights, *held, first=self.first, limit=limit, among=among)
        # [ckpt] transformers and both servers cut the shared expert, too
        shared = self.shared_out(cut_silu(self.shared_in(x), limit))
        return routed + shared


class Residual(NamedTuple):
    """Streams between sublayers, and how the sublayer before has collapsed them, or would have."""

    streams: torch.Tensor  # [T, S, H]
    pre: torch.Tensor | None = None  # [T, S] float32; None before the first


class V4Block:
    """Streams through attention, then through experts."""

    def __init__(
        self, spec: V4Layers, layer: int, weights: V4Weights, prefix: str, vocab_size: int
    ) -> None:
        """Read one layer under `prefix`, e.g. `layers.0.`."""
        self.spec, self.ranks = spec, weights.at.ranks
        self.attention = V4Attention(spec, layer, weights.for_attention, f"{prefix}attn.")
        self.experts = V4Experts(spec, layer, weights, f"{prefix}ffn.", vocab_size)
        self.attention_norm = weights.take(f"{prefix}attn_norm.weight", spec.hidden_size)
        self.experts_norm = weights.take(f"{prefix}ffn_norm.weight", spec.hidden_size)
        self.attention_mix = take_mix(spec, weights, f"{prefix}hc_attn_")
        self.experts_mix = take_mix(spec, weights, f"{prefix}hc_ffn_")

    @property
    def products(self) -> tuple[Linear, ...]:
        """Matrix products that every token takes, those that are not packed."""
        taken = self.attention.low, self.attention.q, self.attention.o, self.experts.shared_in
        return tuple(matrix for matrix in taken if isinstance(matrix, Linear))

    def __call__(self, residual: Residual, step: V4Step, state: LayerState) -> Residual:
        """Streams [T, S, H] to [T, S, H], or those of this rank's tokens."""

        def attend(x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, step, state)

        def think(x: torch.Tensor) -> torch.Tensor:
            return self.experts(x, step.token_ids)

        shards = step.shards
        # who holds the state of a request has all heads, too: nothing to exchange
        alone = isinstance(shards, TokenOwners)
        attention = attend if alone else self._shared(attend, shards)
        residual = self._around(attention, residual, self.attention_mix, self.attention_norm)
        experts = self._shared(think, shards)
        return self._around(experts, residual, self.experts_mix, self.experts_norm)

    def _shared(
        self,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        shards: TokenShards | TokenOwners | None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A sublayer of all tokens, which ranks do parts of, from and to where streams are held."""
        if shards is None:
            return lambda x: self.ranks.all_reduce(sublayer(x))
        return lambda x: shards.sum(sublayer(shards.gather(x)))

    def _around(
        self,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        residual: Residual,
        mix: MixWeights,
        norm: torch.Tensor,
    ) -> Residual:
        """Into a sublayer and back into the streams."""
        streams, before = residual
        pre, post, comb = self._mix(streams, mix)
        used = before if self.spec.delayed else pre
        x = streams[:, 0] if used is None else hc_collapse(streams, used)
        y = sublayer(rms_norm(x, norm, self.spec.norm_eps))
        return Residual(hc_post(y, streams, post, comb), pre)

    def _mix(
        self, streams: torch.Tensor, weights: MixWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hyper = self.spec.hyper
        return hc_mix(
            streams,
            weights,
            norm_eps=self.spec.norm_eps,
            eps=hyper.eps,
            iterations=hyper.sinkhorn_iterations,
        )


def take_mix(spec: V4Layers, weights: V4Weights, prefix: str, *, head: bool = False) -> MixWeights:
    """Hyper-connection weights of a sublayer or, with `head`, of a network's end."""
    s = spec.hyper.num_streams
    rows = s if head else s * (s + 2)
    return MixWeights(
        weights.wide(f"{prefix}fn", rows, s * spec.hidden_size),
        weights.wide(f"{prefix}base", rows),
        weights.wide(f"{prefix}scale", 1 if head else 3),
    )
