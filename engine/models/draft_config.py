"""config.json of a DSpark drafter -> DraftSpec, from the DeepSpec and the speculators format.

They differ in what a config key means, never in the tensors' names:

* DeepSpec: a flat copy of the target's config. `target_layer_ids` k is the output of layer k, so
  h[k + 1]; -1 is the embeddings, h[0]. A missing `sample_from_anchor` means true. All layers see
  the full context.
* speculators: the decoder's config is nested in `transformer_layer_config`, and may leave out its
  class's defaults. `aux_hidden_state_layer_ids` j is h[j] as it is. A missing `sample_from_anchor`
  means false. Layers may slide.
"""

from pathlib import Path
from typing import Any, Literal, cast

from engine.models.config import DraftSpec, LayersSpec, MarkovKind
from engine.models.config_reader import ConfigFields, read_json
from engine.models.decoder_config import (
    architecture_of,
    check_token_id,
    parse_dtype,
    parse_layer_types,
    parse_layers,
    refuse_quantised,
)
from engine.models.deepseek_v4_config import is_deepseek_v4
from engine.models.deepseek_v4_draft_config import parse_deepseek_v4_draft
from engine.models.deepseek_v4_spec import V4DraftSpec

DraftFormat = Literal["deepspec", "speculators", "deepseek-v4"]
SUPPORTED_DRAFTS = (
    "supported drafts: DeepSpec (architectures Qwen3DSparkModel), speculators "
    "(speculators_model_type dspark, Qwen3 or Llama layers) and those in DeepSeek-V4 checkpoints"
)
_MARKOV_KINDS = ("none", "vanilla", "gated", "rnn")

# Nested speculators configs are written as differences from these classes' defaults.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "max_position_embeddings": 32768,
}  # fmt: skip
_LLAMA_DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {"qwen3": _QWEN3_DEFAULTS, "llama": _LLAMA_DEFAULTS}


def draft_format(folder: Path) -> DraftFormat:
    """Which format the drafter in a folder is in.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: It is no drafter, or one that is not supported.
    """
    where = folder / "config.json"
    fields = ConfigFields(read_json(where), str(where))
    kind = fields.raw("speculators_model_type")
    if kind is not None:
        if kind == "dspark":
            return "speculators"
        raise fields.error(
            "speculators_model_type", f"is {kind!r}, not supported", SUPPORTED_DRAFTS
        )
    name = architecture_of(fields)
    if is_deepseek_v4(fields):
        return "deepseek-v4"
    if name == "Qwen3DSparkModel":
        return "deepspec"
    if name.endswith("ForCausalLM") and "dspark_block_size" not in fields:
        raise fields.error(
            "architectures",
            f"is {name!r}: a target, not a drafter",
            "give a DSpark checkpoint as the draft; " + SUPPORTED_DRAFTS,
        )
    shown = name or fields.raw("model_type", "missing")
    raise fields.error("architectures", f"is {shown!r}, not supported", SUPPORTED_DRAFTS)


def parse_draft(folder: Path) -> DraftSpec | V4DraftSpec:
    """What the drafter in a folder is.

    Args:
        folder: A DSpark checkpoint in any format.

    Raises:
        CheckpointError: It cannot be served, with what can.
    """
    found = draft_format(folder)
    if found == "deepseek-v4":
        return parse_deepseek_v4_draft(folder)
    return _parse_deepspec(folder) if found == "deepspec" else _parse_speculators(folder)


def _parse_deepspec(folder: Path) -> DraftSpec:
    where = folder / "config.json"
    fields = ConfigFields(read_json(where), str(where))
    refuse_quantised(fields)
    architecture_of(fields)
    _layer_type_of(fields, ("qwen3",))
    layers = _draft_layers(fields, _QWEN3_DEFAULTS["head_dim"])
    if any(parse_layer_types(fields, layers.num_layers)):
        raise fields.error(
            "layer_types",
            "has sliding_attention layers; DeepSpec drafters are trained on the full context",
            "use the speculators format for drafters with sliding windows",
        )
    depth = fields.integer("num_target_layers")
    ids = fields.integers("target_layer_ids", minimum=-1)
    if list(ids) != sorted(set(ids)) or ids[-1] >= depth:
        raise fields.error(
            "target_layer_ids",
            f"must ascend and stay below num_target_layers={depth}, got {list(ids)}",
        )
    anchor = fields.flag("sample_from_anchor", True)
    block = fields.integer("block_size", minimum=1 if anchor else 2)
    spec = _finish_spec(
        fields,
        layers=layers,
        vocab_size=fields.integer("vocab_size"),
        draft_vocab_size=fields.integer("draft_vocab_size", fields.raw("vocab_size")),
        num_speculative_tokens=block if anchor else block - 1,
        sample_from_anchor=anchor,
        taps=tuple(k + 1 for k in ids),
        num_target_layers=depth,
        windows=(0,) * layers.num_layers,
        causal=(False,) * layers.num_layers,
        max_position=fields.integer("max_position_embeddings"),
        dtype=parse_dtype(fields, folder),
    )
    # Left over from the target's config, or about training: never read by the drafter.
    fields.finish(
        also_inert=(
            *("num_anchors", "tie_word_embeddings", "mlp_bias", "is_encoder_decoder"),
            *("sliding_window", "use_sliding_window", "max_window_layers", "add_cross_attention"),
        )
    )
    return spec


def _parse_speculators(folder: Path) -> DraftSpec:
    where = folder / "config.json"
    fields = ConfigFields(read_json(where), str(where))
    refuse_quantised(fields)
    fields.raw("speculators_model_type")
    nested = fields.raw("transformer_layer_config")
    if not isinstance(nested, dict):
        raise fields.error("transformer_layer_config", f"must be an object, got {nested!r}")
    kind = _layer_type_of(
        ConfigFields(nested, f"{where}: transformer_layer_config"), ("qwen3", "llama")
    )
    decoder = ConfigFields(
        _one_rope(nested), f"{where}: transformer_layer_config", _LAYER_DEFAULTS[kind]
    )
    for key in ("model_type", "architectures"):
        decoder.raw(key)
    refuse_quantised(decoder)
    layers = _draft_layers(decoder, None)
    windows, causal = _windows(fields, decoder, layers.num_layers)
    ids = fields.integers("aux_hidden_state_layer_ids", minimum=0)
    if len(set(ids)) != len(ids):
        raise fields.error("aux_hidden_state_layer_ids", f"must not repeat, got {list(ids)}")
    vocab_size = decoder.integer("vocab_size")
    anchor, gamma = _layout(fields)
    spec = _finish_spec(
        fields,
        layers=layers,
        vocab_size=vocab_size,
        draft_vocab_size=fields.integer("draft_vocab_size"),
        num_speculative_tokens=gamma,
        sample_from_anchor=anchor,
        # Training data comes from an engine that captures in ascending order whatever the list's.
        taps=tuple(sorted(ids)),
        num_target_layers=None,
        windows=windows,
        causal=causal,
        max_position=decoder.integer("max_position_embeddings"),
        dtype=parse_dtype(fields if _says_dtype(fields) else decoder, folder),
    )
    decoder.finish(also_inert=("tie_word_embeddings", "is_encoder_decoder", "add_cross_attention"))
    fields.finish(
        also_inert=(
            *("architectures", "model_type", "speculators_version", "tie_word_embeddings"),
            *("is_encoder_decoder", "add_cross_attention", "has_no_defaults_at_init"),
        )
    )
    return spec


def _says_dtype(fields: ConfigFields) -> bool:
    return "dtype" in fields or "torch_dtype" in fields


def _layer_type_of(fields: ConfigFields, supported: tuple[str, ...]) -> str:
    kind = fields.text("model_type", "qwen3")
    if kind not in supported:
        raise fields.error("model_type", f"is {kind!r}, not supported", SUPPORTED_DRAFTS)
    return kind


def _draft_layers(fields: ConfigFields, default_head_dim: int | None) -> LayersSpec:
    """Draft layers are Qwen3's whatever the config is called: q and k norms, no MLP bias."""
    bias = fields.flag("attention_bias", False)
    fields.expect("mlp_bias", False, SUPPORTED_DRAFTS)
    return parse_layers(
        fields,
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=False,
        default_head_dim=default_head_dim,
    )


def _one_rope(nested: dict[str, Any]) -> dict[str, Any]:
    """Rope per layer type, as some targets write it: the drafter has one, the sliding kind's."""
    rope = nested.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        return {**nested, "rope_parameters": rope["sliding_attention"]}
    return nested


def _windows(
    fields: ConfigFields, decoder: ConfigFields, num_layers: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Per layer: context tokens visible before the anchor (0 = all), and is the block causal?"""
    sliding = parse_layer_types(decoder, num_layers)
    non_causal = fields.flag("sliding_window_non_causal", False)
    for key in ("use_sliding_window", "max_window_layers", "sliding_window"):
        decoder.raw(key)  # layer_types is what training looked at
    if not any(sliding):
        return (0,) * num_layers, (False,) * num_layers
    window = decoder.integer("sliding_window")
    return (
        tuple(window if slides else 0 for slides in sliding),
        tuple(slides and not non_causal for slides in sliding),
    )


def _layout(fields: ConfigFields) -> tuple[bool, int]:
    """Anchor-first or fill-in, and gamma; the file's own token count must agree."""
    written = "sample_from_anchor" in fields
    anchor = fields.flag("sample_from_anchor", False)
    block = fields.integer("block_size", minimum=1 if anchor else 2)
    gamma = block if anchor else block - 1
    proposal = fields.raw("speculators_config", {})
    methods = proposal.get("proposal_methods") if isinstance(proposal, dict) else None
    tokens = methods[0].get("speculative_tokens") if methods else None
    # Training writes gamma here; a smaller number is someone's serving choice, a larger one says
    # that the layout was misread, which would cost all acceptance without any error.
    if isinstance(tokens, int) and tokens > gamma:
        how = "" if written else " (the default of speculators files that do not say)"
        raise fields.error(
            "sample_from_anchor",
            f"is {str(anchor).lower()}{how}, so block_size={block} drafts {gamma} tokens, "
            f"but speculative_tokens is {tokens}",
            "write the layout the draft was trained with as sample_from_anchor in its config.json",
        )
    return anchor, gamma


def _finish_spec(
    fields: ConfigFields, *, layers: LayersSpec, vocab_size: int, **known: Any
) -> DraftSpec:
    """The keys both formats spell the same: heads, mask token, widths."""
    markov, rank = _markov(fields)
    has_confidence = fields.flag("enable_confidence_head", False)
    with_markov = fields.flag("confidence_head_with_markov", False) and has_confidence
    if with_markov and markov == "none":
        raise fields.error(
            "confidence_head_with_markov",
            "is true but markov_rank is 0",
            "use a consistent checkpoint",
        )
    return DraftSpec(
        layers=layers,
        vocab_size=vocab_size,
        mask_token_id=check_token_id(
            fields, "mask_token_id", fields.integer("mask_token_id", minimum=0), vocab_size
        ),
        target_hidden_size=fields.integer("target_hidden_size", layers.hidden_size),
        markov=markov,
        markov_rank=rank,
        has_confidence=has_confidence,
        confidence_with_markov=with_markov,
        **known,
    )


def _markov(fields: ConfigFields) -> tuple[MarkovKind, int]:
    rank = fields.integer("markov_rank", 0, minimum=0)
    kind = fields.text("markov_head_type", "vanilla")
    if kind not in _MARKOV_KINDS:
        raise fields.error(
            "markov_head_type",
            f"is {kind!r}; supported are {', '.join(_MARKOV_KINDS)}",
            SUPPORTED_DRAFTS,
        )
    if rank == 0 or kind == "none":
        return "none", 0
    return cast(MarkovKind, kind), rank
