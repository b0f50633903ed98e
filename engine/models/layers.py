"""Decoder layers that target and draft share: attention, gated MLP, pre-norm residuals."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from engine.dist.collectives import Collectives, Solo
from engine.kernels.linear import Linear
from engine.kernels.norms import rms_norm
from engine.kernels.paged_attention import AttentionBatch, paged_attention
from engine.kernels.rope import inverse_frequencies, rope_table
from engine.kernels.rope_attention import joins, rope_attention_triton
from engine.kernels.rope_product import Turn, rope_product
from engine.kv.cache import PagedKV
from engine.models.config import LayersSpec
from engine.models.shard import Part, Share


class Weights(Protocol):
    """Where tensors come from; engine.models.loader.Checkpoint is one."""

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Read one tensor, checked against `shape`, or a part; remember that it was used."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Dtype, device and ranks of a network."""

    dtype: torch.dtype
    device: torch.device
    ranks: Collectives = field(default_factory=Solo)
    """What the network is dealt to."""

    data_attention: bool = False
    """Is attention whole on every rank, each for the requests that it holds the state of?"""

    @property
    def attention(self) -> "Placement":
        """Where attention's weights go."""
        return replace(self, ranks=Solo()) if self.data_attention else self

    def held(self, num_reqs: int) -> int:
        """Of so many requests, those that one rank has room for."""
        return -(-num_reqs // self.ranks.size) if self.data_attention else num_reqs

    @property
    def share(self) -> Share:
        """This rank's part of it."""
        return Share(self.ranks.rank, self.ranks.size)

    @property
    def settings(self) -> dict[str, Any]:
        """As EngineConfig fields."""
        name = str(self.dtype).removeprefix("torch.")
        return {"dtype": name, "device": self.device.type}


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of one forward needs. T tokens."""

    cos_sin: torch.Tensor  # [T, 2, D/2] float32
    slots: torch.Tensor  # [T] int64
    attention: AttentionBatch
    kv: PagedKV


class Stream(NamedTuple):
    """A residual stream whose last term is still to be added: the next norm adds it on its way."""

    residual: torch.Tensor  # [T, H]
    delta: torch.Tensor | None  # [T, H], this rank's part; None: nothing to add
    place: int = 0
    """0 after attention, 1 after the MLP, 2 after embeddings: no two sums in a row at one place."""

    def enter(
        self, weight: torch.Tensor, eps: float, ranks: Collectives
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMS norm of the whole stream, and the whole stream; both [T, H]."""
        if self.delta is None:
            return rms_norm(self.residual, weight, eps), self.residual
        return ranks.add_rms_norm(self.delta, self.residual, weight, eps, self.place)


def make_rope_table(spec: LayersSpec, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, 2, D/2] float32."""
    r = spec.rope
    inv = inverse_frequencies(
        spec.head_dim,
        r.theta,
        kind=r.kind,
        factor=r.factor,
        low_freq_factor=r.low_freq_factor,
        high_freq_factor=r.high_freq_factor,
        original_max_position=r.original_max_position,
    )
    return rope_table(inv, num_positions).to(device)


def once(bias: torch.Tensor, at: Placement) -> torch.Tensor | None:
    """A bias of terms that ranks sum up: rank 0 adds it."""
    return bias if at.ranks.rank == 0 else None


class Embedding:
    """Token embeddings, rows dealt to ranks; what a rank does not hold it gives as 0 to the sum."""

    def __init__(self, weight: torch.Tensor, at: Placement) -> None:
        """Take over `weight` [width, H], this rank's rows of the vocabulary."""
        self.weight = weight
        self._ranks = at.ranks
        self._first = at.ranks.rank * len(weight)

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.weight.dtype

    def __call__(self, token_ids: torch.Tensor) -> Stream:
        """[T] int64 to the stream that begins with their rows."""
        if self._ranks.size == 1:
            return Stream(self.weight[token_ids], None)
        at = token_ids - self._first
        held = (at >= 0) & (at < len(self.weight))
        rows = self.weight[at.clamp(0, len(self.weight) - 1)]
        part = torch.where(held[:, None], rows, 0)
        return Stream(torch.zeros_like(part), part, 2)


class Attention:
    """Grouped-query attention with q, k and v in one product, over this rank's heads."""

    def __init__(self, spec: LayersSpec, weights: Weights, prefix: str, at: Placement) -> None:
        """Read this rank's part of `{q,k,v,o}_proj` and the norms under `prefix`."""
        self.spec = at.share.layers(spec)
        d, h = spec.head_dim, spec.hidden_size
        rows = {"q": spec.num_heads * d, "k": spec.num_kv_heads * d, "v": spec.num_kv_heads * d}

        def take(name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
            return weights.take(prefix + name, shape, dtype=at.dtype, device=at.device, part=part)

        part = {n: at.share.heads(spec, n, dim=0) for n in rows}
        parts = [take(f"{n}_proj.weight", (size, h), part[n]) for n, size in rows.items()]
        biases = [
            take(f"{n}_proj.bias", (size,), part[n]) for n, size in rows.items() if spec.qkv_bias
        ]
        self.qkv = Linear(torch.cat(parts), torch.cat(biases) if biases else None)
        o_bias = once(take("o_proj.bias", (h,)), at) if spec.o_bias else None
        columns = at.share.heads(spec, "q", dim=1)
        self.o = Linear(take("o_proj.weight", (h, rows["q"]), columns), o_bias)
        self.q_norm = take("q_norm.weight", (d,)) if spec.qk_norm else None
        self.k_norm = take("k_norm.weight", (d,)) if spec.qk_norm else None

    def __call__(
        self, x: torch.Tensor, ctx: StepContext, layer: int, *, causal: bool = True, window: int = 0
    ) -> torch.Tensor:
        """[T, H] normed input to this rank's part of [T, H]; stores this layer's K and V first."""
        spec, k_cache, v_cache = self.spec, ctx.kv.k[layer], ctx.kv.v[layer]
        turn = Turn(
            self.q_norm, self.k_norm, spec.norm_eps, ctx.cos_sin, k_cache, v_cache, ctx.slots
        )
        scale, batch = spec.head_dim**-0.5, ctx.attention
        if joins(spec.num_heads, k_cache, batch):
            qkv = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
            out = rope_attention_triton(
                qkv, *turn, batch, scale=scale, causal=causal, window=window
            )
        else:
            q = rope_product(x, self.qkv, turn)
            out = paged_attention(
                q, k_cache, v_cache, batch, scale=scale, causal=causal, window=window
            )
        return self.o(out.flatten(1))


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: LayersSpec, weights: Weights, prefix: str, at: Placement) -> None:
        h, i = spec.hidden_size, spec.intermediate_size

        def take(name: str, shape: tuple[int, ...], part: Part | None = None) -> torch.Tensor:
            return weights.take(prefix + name, shape, dtype=at.dtype, device=at.device, part=part)

        self.eps = spec.norm_eps
        self.ranks = at.ranks
        self.attention = Attention(spec, weights, prefix + "self_attn.", at)
        self.input_norm = take("input_layernorm.weight", (h,))
        self.post_norm = take("post_attention_layernorm.weight", (h,))
        rows, columns = at.share.even(i, dim=0), at.share.even(i, dim=1)
        gate_up = [take(f"mlp.{n}_proj.weight", (i, h), rows) for n in ("gate", "up")]
        biases = [take(f"mlp.{n}_proj.bias", (i,), rows) for n in ("gate", "up") if spec.mlp_bias]
        self.gate_up = Linear(torch.cat(gate_up), torch.cat(biases) if biases else None)
        down_bias = once(take("mlp.down_proj.bias", (h,)), at) if spec.mlp_bias else None
        self.down = Linear(take("mlp.down_proj.weight", (h, i), columns), down_bias)

    @property
    def products(self) -> tuple[Linear, ...]:
        """Its matrix products, in order."""
        return self.attention.qkv, self.attention.o, self.gate_up, self.down

    def enter(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Input norm: the normed input [T, H], and the residual stream before this layer."""
        return stream.enter(self.input_norm, self.eps, self.ranks)

    def __call__(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        ctx: StepContext,
        layer: int,
        *,
        causal: bool = True,
        window: int = 0,
    ) -> Stream:
        """The layer's work on what `enter` gave."""
        delta = self.attention(normed, ctx, layer, causal=causal, window=window)
        normed, residual = Stream(residual, delta, 0).enter(self.post_norm, self.eps, self.ranks)
        return Stream(residual, self.down(self.gate_up.gated(normed)), 1)
