"""DeepSeek-V4 tensors by their released names, whatever names the files use.

Three spellings exist: the released one; transformers' own (`model.layers.0.self_attn.q_a_proj`,
with all experts of a layer in one tensor); and what transformers saves, the released names below
`model.` but for a few.
"""

import re
from collections.abc import Callable

import torch

from engine.models.layers import Placement, Weights
from engine.models.shard import Part

_LAYER = (
    (r"attn_norm\.weight", "input_layernorm.weight"),
    (r"ffn_norm\.weight", "post_attention_layernorm.weight"),
    (r"hc_(attn|ffn)_(fn|base|scale)", r"\1_hc.\2"),
    (r"attn\.wq_a\.weight", "self_attn.q_a_proj.weight"),
    (r"attn\.wq_b\.weight", "self_attn.q_b_proj.weight"),
    (r"attn\.wkv\.weight", "self_attn.kv_proj.weight"),
    (r"attn\.wo_a\.weight", "self_attn.o_a_proj.weight"),
    (r"attn\.wo_b\.weight", "self_attn.o_b_proj.weight"),
    (r"attn\.q_norm\.weight", "self_attn.q_a_norm.weight"),
    (r"attn\.kv_norm\.weight", "self_attn.kv_norm.weight"),
    (r"attn\.attn_sink", "self_attn.sinks"),
    (r"attn\.compressor\.", "self_attn.compressor."),
    (r"attn\.indexer\.wq_b\.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    (
        r"attn\.indexer\.weights_proj\.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    (r"attn\.indexer\.compressor\.", "self_attn.compressor.indexer."),
    (r"ffn\.gate\.weight", "mlp.gate.weight"),
    (r"ffn\.gate\.bias", "mlp.gate.e_score_correction_bias"),
    (r"ffn\.gate\.tid2eid", "mlp.gate.tid2eid"),
    (r"ffn\.shared_experts\.w1\.weight", "mlp.shared_experts.gate_proj.weight"),
    (r"ffn\.shared_experts\.w2\.weight", "mlp.shared_experts.down_proj.weight"),
    (r"ffn\.shared_experts\.w3\.weight", "mlp.shared_experts.up_proj.weight"),
)
_COMPRESSOR = (
    ("wkv.weight", "kv_proj.weight"),
    ("wgate.weight", "gate_proj.weight"),
    ("ape", "position_bias"),
    ("norm.weight", "kv_norm.weight"),
)
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}


def spellings(name: str) -> tuple[str, ...]:
    """Every way a released name is written, that one first."""
    if name in _TOP:
        return name, _TOP[name]
    found = [name, f"model.{name}"]
    if name.endswith(".attn.kv_norm.weight"):
        # what transformers makes of it when it saves
        found.append("model." + name.replace(".kv_norm.", ".norm."))
    layer = re.fullmatch(r"(layers\.\d+\.)(.*)", name)
    if layer is not None:
        own = _transformers_name(layer[2])
        found += [] if own is None else [f"model.{layer[1]}{own}"]
    return tuple(found)


def _transformers_name(name: str) -> str | None:
    """Below a layer's prefix."""
    for pattern, theirs in _LAYER:
        if not pattern.endswith(r"compressor\."):
            if re.fullmatch(pattern, name):
                return re.sub(pattern, theirs, name)
            continue
        match = re.match(pattern, name)
        for ours, renamed in _COMPRESSOR if match else ():
            if match is not None and name[match.end() :] == ours:
                return theirs + renamed
    return None


class V4Weights:
    """Tensors by released names, where a network is to have them.

    Args:
        weights: Where they come from.
        has: Is there a tensor of this name?
        at: Dtype, device and ranks of the network.
    """

    def __init__(self, weights: Weights, has: Callable[[str], bool], at: Placement) -> None:
        self._weights = weights
        self._has = has
        self.at = at

    def has(self, name: str) -> bool:
        """Is there a tensor of this released name, in any spelling?"""
        return any(self._has(each) for each in spellings(name))

    def take(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """A tensor in the network's dtype, checked against its whole shape, or a part of it."""
        return self._take(name, shape, self.at.dtype, part)

    def wide(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """A tensor in float32, whatever the network's dtype is."""
        return self._take(name, shape, torch.float32, part)

    def whole(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of integers, int64."""
        return self._take(name, shape, torch.int64, None)

    def experts(
        self, prefix: str, count: int, width: int, hidden: int, part: Part | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Routed experts, each as gate over up [2I, H] and down [H, I].

        Args:
            prefix: Released, e.g. `layers.0.ffn.experts.`.
            count: Experts of the layer.
            width: I.
            hidden: H.
            part: Which of them; None: all. None are made up to fill its width.
        """
        first, stop = (0, count) if part is None else (part.start, part.stop)
        joint = "model." + prefix.replace(".ffn.", ".mlp.")
        if self._has(joint + "gate_up_proj"):
            every = self.take(joint + "gate_up_proj", count, 2 * width, hidden, part=part)
            downs = self.take(joint + "down_proj", count, hidden, width, part=part)
            return [(every[i].clone(), downs[i].clone()) for i in range(stop - first)]
        found = []
        for e in range(count):
            # experts of other ranks are checked, without being read
            mine = None if first <= e < stop else Part(0, 0, 0, 0)
            gate, down, up = (
                self.take(f"{prefix}{e}.{name}.weight", *shape, part=mine)
                for name, shape in (
                    ("w1", (width, hidden)),
                    ("w2", (hidden, width)),
                    ("w3", (width, hidden)),
                )
            )
            if mine is None:
                found.append((torch.cat((gate, up)), down))
        return found

    def _take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None
    ) -> torch.Tensor:
        written = next((each for each in spellings(name) if self._has(each)), name)
        return self._weights.take(written, shape, dtype=dtype, device=self.at.device, part=part)
