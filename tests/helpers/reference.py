"""Slow, separate definitions of what target and draft compute, one request at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers.checkpoints import read_tensors, reference_model


class PlainTarget:
    """The target as transformers runs it, without a cache."""

    def __init__(self, folder: Path) -> None:
        self.model = reference_model(folder)

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """h[0..L], each [T, H] and un-normed, and the logits [T, V]."""
        taken: list[torch.Tensor] = []
        inner = self.model.model

        def keep(_module: Any, _args: Any, out: Any) -> None:
            taken.append((out[0] if isinstance(out, tuple) else out)[0])

        hooks = [m.register_forward_hook(keep) for m in (inner.embed_tokens, *inner.layers)]
        try:
            logits = self.model(torch.tensor([list(token_ids)])).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return taken, logits

    def greedy(self, prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = ()) -> list[int]:
        """Greedy continuation, EOS included."""
        ids = list(prompt)
        for _ in range(max_tokens):
            ids.append(int(self.states(ids)[1][-1].argmax()))
            if ids[-1] in eos:
                break
        return ids[len(prompt) :]


@dataclass(frozen=True, kw_only=True)
class PlainDraft:
    """A DSpark drafter written out: dense attention, a Python loop for the chain."""

    folder: Path
    target: PlainTarget
    taps: Sequence[int]
    gamma: int
    mask: int
    fill_in: bool = False
    windows: Sequence[int] = (0, 0)
    window_causal: bool = True
    kind: str = "vanilla"
    head_dim: int = 8
    theta: float = 10000.0
    eps: float = 1e-6

    @torch.inference_mode()
    def draft(self, token_ids: Sequence[int]) -> tuple[list[int], list[float]]:
        """Drafts and confidence logits after `token_ids`, whose last is the anchor."""
        w = read_tensors(self.folder)
        states, _ = self.target.states(token_ids)
        context_len = len(token_ids) - 1
        taps = torch.cat([states[j][:context_len] for j in self.taps], dim=-1)
        context = self._norm(taps @ w["fc.weight"].t(), w["hidden_norm.weight"])
        rows = self.gamma + int(self.fill_in)
        block = [token_ids[-1], *[self.mask] * (rows - 1)]
        embed = w.get("embed_tokens.weight", self.target.model.get_input_embeddings().weight)
        x = embed[block]
        for i, window in enumerate(self.windows):
            x = self._layer(w, f"layers.{i}.", x, context, window)
        hidden = self._norm(x, w["norm.weight"])[int(self.fill_in) :]
        head = w.get("lm_head.weight", self.target.model.get_output_embeddings().weight)
        return self._chain(w, hidden, hidden @ head.t(), token_ids[-1])

    def _layer(
        self,
        w: dict[str, torch.Tensor],
        p: str,
        x: torch.Tensor,
        context: torch.Tensor,
        window: int,
    ) -> torch.Tensor:
        a, d, n, c = p + "self_attn.", self.head_dim, len(x), len(context)
        y = self._norm(x, w[p + "input_layernorm.weight"])

        def heads(z: torch.Tensor, name: str, start: int, norm: str | None) -> torch.Tensor:
            bias = w.get(f"{a}{name}_proj.bias")
            out = z @ w[f"{a}{name}_proj.weight"].t() + (0 if bias is None else bias)
            out = out.view(len(z), -1, d)
            if norm is None:
                return out
            out = self._norm(out, w[a + norm])
            return torch.stack([self._rotate(out[i], start + i) for i in range(len(z))])

        q = heads(y, "q", c, "q_norm.weight")
        parts = [heads(z, "k", s, "k_norm.weight") for z, s in ((context, 0), (y, c)) if len(z)]
        k = torch.cat(parts)
        v = torch.cat([heads(z, "v", 0, None) for z in (context, y) if len(z)])
        group = q.shape[1] // k.shape[1]
        out = torch.zeros_like(q)
        for i in range(n):
            for h in range(q.shape[1]):
                seen = [
                    j
                    for j in range(c + n)
                    if (j >= c - window or not window)
                    and (j < c or not (window and self.window_causal) or j - c <= i)
                ]
                scores = torch.stack([q[i, h] @ k[j, h // group] for j in seen]) / math.sqrt(d)
                out[i, h] = scores.softmax(dim=0) @ v[seen, h // group]
        x = x + out.flatten(1) @ w[a + "o_proj.weight"].t() + w.get(a + "o_proj.bias", 0)
        y = self._norm(x, w[p + "post_attention_layernorm.weight"])
        gate = y @ w[p + "mlp.gate_proj.weight"].t()
        up = y @ w[p + "mlp.up_proj.weight"].t()
        return x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down_proj.weight"].t()

    def _chain(
        self, w: dict[str, torch.Tensor], hidden: torch.Tensor, base: torch.Tensor, anchor: int
    ) -> tuple[list[int], list[float]]:
        prev, ids, confidence = anchor, [], []
        w1, w2 = w.get("markov_head.markov_w1.weight"), w.get("markov_head.markov_w2.weight")
        state = torch.zeros(0 if w1 is None else w1.shape[1])
        for k in range(self.gamma):
            logits, h = base[k], hidden[k]
            features = h
            if w1 is not None and w2 is not None:
                e = w1[prev]
                features = torch.cat((h, e))
                if self.kind == "vanilla":
                    logits = logits + w2 @ e
                elif self.kind == "gated":
                    g = w["markov_head.gate_proj.weight"] @ torch.cat((h, e))
                    g = (g + w["markov_head.gate_proj.bias"]).sigmoid()
                    logits = logits + w2 @ (g * e)
                else:
                    z = w["markov_head.joint_proj.weight"] @ torch.cat((state, e, h))
                    u, cand, o = (z + w["markov_head.joint_proj.bias"]).chunk(3)
                    logits = logits + w2 @ o.tanh()
                    state = u.sigmoid() * state + (1 - u.sigmoid()) * cand.tanh()
            proj = w.get("confidence_head.proj.weight")
            if proj is not None:
                used = features[: proj.shape[1]]
                confidence.append(float(proj[0] @ used + w["confidence_head.proj.bias"]))
            prev = int(logits.argmax())
            if "d2t" in w:
                prev += int(w["d2t"][prev])
            ids.append(prev)
        return ids, confidence

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * weight

    def _rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        inv = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (position * inv).float()
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
