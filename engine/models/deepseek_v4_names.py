"""DeepSeek-V4 tensors by their released names, whatever names the files use.

Three spellings exist: the released one; transformers' own (`model.layers.0.self_attn.q_a_proj`,
with all experts of a layer in one tensor); and what transformers saves, the released names below
`model.` but for a few.
"""

import re

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
