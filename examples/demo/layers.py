"""Qwen3-style layers in plain torch, shared by the training of the target and of the drafters.

Parameter names are those of the checkpoints, so a state dict is a checkpoint.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a network; ``layers`` and ``intermediate`` differ between target and drafters."""

    vocab: int = 1024
    hidden: int = 256
    intermediate: int = 640
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    eps: float = 1e-6
    theta: float = 10000.0
    positions: int = 2048


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(
            x.dtype
        )


def rope_at(positions: Tensor, shape: Shape) -> Rope:
    """Cosines and sines [..., head_dim] for positions of any leading shape."""
    half = shape.head_dim // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angle = positions.float().unsqueeze(-1) * shape.theta**-exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate [batch, heads, tokens, head_dim]; rope is [batch or 1, tokens, head_dim]."""
    cos, sin = (r.unsqueeze(-3) for r in rope)
    a, b = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim, self.groups = shape.head_dim, shape.heads // shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        k = rotate(self.k_norm(self._heads(self.k_proj(x))), rope)
        return k, self._heads(self.v_proj(x)).to(k.dtype)

    def attend(
        self, x: Tensor, rope: Rope, kv: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Attend from x to keys and values; without a mask the attention is causal."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rope)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in kv)
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer. ``context`` is what a drafter attends to besides its own rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        context: Tensor | None = None,
        context_rope: Rope | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        normed = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(normed, rope)
        if context is not None and context_rope is not None:
            ck, cv = self.self_attn.keys_values(context, context_rope)
            k, v = torch.cat([ck, k], dim=2), torch.cat([cv, v], dim=2)
        x = x + self.self_attn.attend(normed, rope, (k, v), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def init_weights(module: nn.Module, layers: int) -> None:
    """Small normal weights; what writes to the residual stream starts smaller."""
    for name, p in module.named_parameters():
        if p.dim() < 2:
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)


class TargetModel(nn.Module):
    """The trunk of the target; its logits are the final hidden states times the embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        init_weights(self, shape.layers)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight)

    def forward(self, ids: Tensor, tap_ids: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor]]:
        """Normed final hidden states, and the taps: outputs of layers, -1 for the embeddings."""
        x = self.embed_tokens(ids)
        rope = rope_at(torch.arange(ids.shape[1], device=ids.device)[None], self.shape)
        taps = {-1: x}
        for i, layer in enumerate(self.layers):
            x = layer(x, rope)
            taps[i] = x
        return self.norm(x), [taps[i] for i in tap_ids]
