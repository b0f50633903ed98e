"""What a tiny DSpark drafter consists of: its config in both formats, and its random tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BOS, EOS, MASK, UNK = 0, 1, 2, 3

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A drafter for the default target of `tests.helpers.checkpoints`."""

    num_layers: int = 2
    hidden_size: int = 32
    target_hidden_size: int | None = None
    intermediate_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 128
    draft_vocab_size: int | None = None
    """Below vocab_size: d2t, t2d (speculators) and an lm_head are written."""

    num_target_layers: int = 3
    taps: Sequence[int] = (1, 3)
    """j of the target's h[j]; written in the format's own numbers."""

    gamma: int = 4
    """Tokens per round; `block_size` is gamma, or gamma + 1 for the fill-in layout."""

    sample_from_anchor: bool = True
    """False: fill-in layout."""

    write_layout: bool = True
    """False: leave `sample_from_anchor` out (DeepSpec always does when it is true)."""

    mask_token_id: int = MASK
    markov: str = "vanilla"
    """none, vanilla, gated or rnn."""

    markov_rank: int = 8
    confidence: bool = True
    confidence_with_markov: bool | None = None
    """None: if there is a Markov head."""

    windows: Sequence[int] | None = None
    """Per layer, 0 = full attention; the others must agree (speculators only)."""

    window_non_causal: bool = False
    attention_bias: bool = False
    rope_theta: float = 10000.0
    max_position: int = 512
    embed: torch.Tensor | bool = False
    """True: a random embed_tokens; a tensor: that one, e.g. the target's; False: absent."""

    lm_head: torch.Tensor | bool = False
    """Likewise, [draft vocabulary, hidden]."""

    dtype: str = "float32"
    seed: int = 1

    @property
    def with_markov(self) -> bool:
        """Does the confidence head see W1[previous token]?"""
        chosen = self.confidence_with_markov
        return self.markov != "none" if chosen is None else chosen

    @property
    def draft_vocab(self) -> int:
        """Rows of the draft's logits."""
        return self.draft_vocab_size or self.vocab_size

    def deepspec_config(self) -> dict[str, Any]:
        """config.json as DeepSpec writes it: a flat copy of a Qwen3 config and more."""
        config = {
            "architectures": ["Qwen3DSparkModel"],
            **self._decoder(),
            **self._heads(),
            "dtype": self.dtype,
            "num_target_layers": self.num_target_layers,
            "target_layer_ids": [j - 1 for j in self.taps],
            "num_anchors": 64,
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "transformers_version": "5.17.0",
            "use_cache": True,
        }
        if self.write_layout and not self.sample_from_anchor:
            config["sample_from_anchor"] = False
        if self.draft_vocab_size is not None:
            config["draft_vocab_size"] = self.draft_vocab_size
        return config

    def speculators_config(self) -> dict[str, Any]:
        """config.json as the speculators library writes it."""
        config = {
            "speculators_model_type": "dspark",
            "architectures": ["DSparkSpeculator"],
            "transformer_layer_config": {**self._decoder(), "tie_word_embeddings": False},
            "draft_vocab_size": self.draft_vocab,
            "aux_hidden_state_layer_ids": list(self.taps),
            "sliding_window_non_causal": self.window_non_causal,
            "target_hidden_size": None,
            **self._heads(),
            "dtype": self.dtype,
            "speculators_version": "0.9.0",
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "dspark",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.gamma}],
                "verifier": {"name_or_path": "t", "architectures": ["Qwen3ForCausalLM"]},
            },
        }
        if self.write_layout:
            config["sample_from_anchor"] = self.sample_from_anchor
        return config

    def tensors(self) -> dict[str, torch.Tensor]:
        """Random weights under the public names."""
        generator = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        tensors = {
            name: random_weight(name, shape, generator).to(dtype)
            for name, shape in self._shapes().items()
        }
        for name, given in (("embed_tokens.weight", self.embed), ("lm_head.weight", self.lm_head)):
            if isinstance(given, torch.Tensor):
                tensors[name] = given.to(dtype).clone()
        if self.draft_vocab < self.vocab_size:
            order = torch.randperm(self.vocab_size, generator=generator)
            kept = order[: self.draft_vocab].sort().values
            tensors["d2t"] = kept - torch.arange(self.draft_vocab)
            mask = torch.zeros(self.vocab_size, dtype=torch.bool)
            tensors["t2d"] = mask.index_fill(0, kept, True)
        return tensors

    def _decoder(self) -> dict[str, Any]:
        windows = self.windows or (0,) * self.num_layers
        sizes = {w for w in windows if w}
        assert len(windows) == self.num_layers, windows
        assert len(sizes) <= 1, "one window size per checkpoint"
        return {
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_position,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windows],
            "sliding_window": next(iter(sizes), None),
            "use_sliding_window": bool(sizes),
            "max_window_layers": 28,
        }

    def _heads(self) -> dict[str, Any]:
        heads = {
            "block_size": self.gamma + (not self.sample_from_anchor),
            "mask_token_id": self.mask_token_id,
            "markov_rank": 0 if self.markov == "none" else self.markov_rank,
            "markov_head_type": "vanilla" if self.markov == "none" else self.markov,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.with_markov,
        }
        if self.target_hidden_size is not None:
            heads["target_hidden_size"] = self.target_hidden_size
        return heads

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        target_hidden = self.target_hidden_size or hidden
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.taps) * target_hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for i in range(self.num_layers):
            shapes |= self._layer_shapes(f"layers.{i}.")
        if self.markov != "none":
            shapes |= self._markov_shapes()
        if self.confidence:
            width = hidden + (self.markov_rank if self.with_markov else 0)
            shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        if self.embed is True:
            shapes["embed_tokens.weight"] = (self.vocab_size, hidden)
        reduced = self.draft_vocab < self.vocab_size
        if self.lm_head is True or (reduced and self.lm_head is False):
            shapes["lm_head.weight"] = (self.draft_vocab, hidden)
        return shapes

    def _layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        hidden, inter = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = f"{layer}self_attn."
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows, columns in (
            ("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q),
        ):  # fmt: skip
            shapes[f"{attention}{name}_proj.weight"] = (rows, columns)
            if self.attention_bias:
                shapes[f"{attention}{name}_proj.bias"] = (rows,)
        shapes |= {f"{attention}{n}_norm.weight": (self.head_dim,) for n in "qk"}
        shapes |= {f"{layer}{n}.weight": (hidden,) for n in _NORMS}
        shapes |= {f"{layer}mlp.{n}_proj.weight": (inter, hidden) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inter)
        return shapes

    def _markov_shapes(self) -> dict[str, tuple[int, ...]]:
        r, hidden = self.markov_rank, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (self.vocab_size, r),
            "markov_head.markov_w2.weight": (self.draft_vocab, r),
        }
        if self.markov == "gated":
            shapes["markov_head.gate_proj.weight"] = (r, hidden + r)
            shapes["markov_head.gate_proj.bias"] = (r,)
        elif self.markov == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * r,)
        return shapes


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Weights of a size that keeps activations near 1, and logits far from uniform."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if "embed_tokens" in name or "markov_w1" in name:
        return noise
    return noise * 1.5 * shape[-1] ** -0.5
