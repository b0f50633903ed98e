"""The demo's DSpark drafter in plain torch: what the drafters are trained with and checked with.

One forward pass over a draft block: rows [anchor, mask, mask, ...] at the anchor's position and
after it attend to each other both ways and to the context, which is made from the target's taps
at the positions before the anchor. Row k predicts the token at anchor position + k + 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.demo import tokens
from examples.demo.layers import Layer, RMSNorm, Shape, init_weights, rope_at
from examples.demo.train_target import target_config


@dataclass(frozen=True)
class DraftShape:
    """What a drafter adds to the shape of its layers."""

    target_layers: int
    tap_ids: tuple[int, ...]
    rank: int
    head: str  # "vanilla" or "rnn"
    confidence_with_markov: bool
    gamma: int = 7


class MarkovHead(nn.Module):
    """Bias on the base logits from the tokens drafted before."""

    def __init__(self, shape: Shape, draft: DraftShape) -> None:
        super().__init__()
        self.rank = draft.rank
        self.markov_w1 = nn.Embedding(shape.vocab, draft.rank)
        self.markov_w2 = nn.Linear(draft.rank, shape.vocab, bias=False)
        if draft.head == "rnn":
            self.joint_proj = nn.Linear(2 * draft.rank + shape.hidden, 3 * draft.rank)

    def start(self, hidden: Tensor) -> Tensor:
        """The state before the first row; only the recurrent head uses it."""
        return hidden.new_zeros(*hidden.shape[:-1], self.rank)

    def step(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Next state, bias over the vocabulary, embedding of the token before."""
        e = self.markov_w1(prev)
        if not hasattr(self, "joint_proj"):
            return state, self.markov_w2(e), e
        keep, new, out = self.joint_proj(torch.cat([state, e, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return keep * state + (1 - keep) * new.tanh(), self.markov_w2(out.tanh()), e


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, e: Tensor) -> Tensor:
        features = torch.cat([hidden, e], dim=-1)[..., : self.proj.in_features]
        return self.proj(features.to(self.proj.weight.dtype)).squeeze(-1)


class Drafter(nn.Module):
    """Embeddings and output head are the target's and are passed in."""

    def __init__(self, shape: Shape, draft: DraftShape) -> None:
        super().__init__()
        self.shape, self.draft = shape, draft
        width = shape.hidden
        self.fc = nn.Linear(len(draft.tap_ids) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(width, shape.eps)
        self.markov_head = MarkovHead(shape, draft)
        with_markov = draft.confidence_with_markov
        self.confidence_head = ConfidenceHead(width + (draft.rank if with_markov else 0))
        init_weights(self, shape.layers)

    def context(self, taps: list[Tensor]) -> Tensor:
        """One vector a committed position: what every layer makes context K/V from."""
        return self.hidden_norm(self.fc(torch.cat(taps, dim=-1)))

    def block(self, rows: Tensor, positions: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """Hidden states after the final norm.

        rows [batch, rows, hidden] are embeddings, positions [batch, rows] theirs; the context
        [batch, length, hidden] stands at positions 0, 1, ...; mask [batch, 1, rows, length + rows].
        """
        rope = rope_at(positions, self.shape)
        length = torch.arange(context.shape[1], device=rows.device)[None]
        context_rope = rope_at(length, self.shape)
        x = rows
        for layer in self.layers:
            x = layer(x, rope, context, context_rope, mask)
        return self.norm(x)


def drafter_config(shape: Shape, draft: DraftShape, target: Shape) -> dict[str, Any]:
    """The target's config, changed where the drafter differs."""
    return target_config(target) | {
        "architectures": ["Qwen3DSparkModel"],
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "max_window_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "tie_word_embeddings": False,
        "num_target_layers": draft.target_layers,
        "target_layer_ids": list(draft.tap_ids),
        "block_size": draft.gamma,
        "mask_token_id": tokens.MASK,
        "num_anchors": 24,
        "enable_confidence_head": True,
        "confidence_head_with_markov": draft.confidence_with_markov,
        "markov_rank": draft.rank,
        "markov_head_type": draft.head,
    }


def save_drafter(drafter: Drafter, target: Shape, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter_config(drafter.shape, drafter.draft, target)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in drafter.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_drafter(folder: Path) -> Drafter:
    """A float32 drafter from its folder."""
    c = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        intermediate=c["intermediate_size"],
        layers=c["num_hidden_layers"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        eps=c["rms_norm_eps"],
        theta=c["rope_parameters"]["rope_theta"],
        positions=c["max_position_embeddings"],
    )
    draft = DraftShape(
        target_layers=c["num_target_layers"],
        tap_ids=tuple(c["target_layer_ids"]),
        rank=c["markov_rank"],
        head=c["markov_head_type"],
        confidence_with_markov=c["confidence_head_with_markov"],
        gamma=c["block_size"],
    )
    drafter = Drafter(shape, draft)
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= {k: v.float() for k, v in load_file(path).items()}
    drafter.load_state_dict(state)
    return drafter.eval()
