"""config.json of a target -> its spec; what is not served is refused by name.

Dense Llama, Qwen2 and Qwen3 are read here, DeepSeek-V4 and V4.1 in files of their own.
"""

from pathlib import Path

from engine.models.config import LayersSpec, TargetSpec
from engine.models.config_reader import ConfigFields, read_json
from engine.models.decoder_config import (
    architecture_of,
    parse_dtype,
    parse_eos,
    parse_layer_types,
    parse_layers,
    refuse_quantised,
)
from engine.models.deepseek_v4_config import ARCHITECTURE, is_deepseek_v4, parse_deepseek_v4
from engine.models.deepseek_v4_spec import V4TargetSpec
from engine.models.deepseek_v41_config import ARCHITECTURE_V41

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED_TARGETS = (
    "supported targets: "
    + ", ".join(TARGET_ARCHITECTURES)
    + f" (dense), {ARCHITECTURE}, {ARCHITECTURE_V41}"
)
_BY_MODEL_TYPE = dict(zip(("llama", "qwen2", "qwen3"), TARGET_ARCHITECTURES, strict=True))
# Qwen3Config's own default; the other two divide hidden_size by heads.
_QWEN3_HEAD_DIM = 128


def parse_target(folder: Path) -> TargetSpec | V4TargetSpec:
    """What the target in a folder is.

    Args:
        folder: A Hugging Face checkpoint.

    Raises:
        CheckpointError: The checkpoint is not one the engine can serve, with what it can.
    """
    where = folder / "config.json"
    fields = ConfigFields(read_json(where), str(where))
    if is_deepseek_v4(fields):
        return parse_deepseek_v4(folder)
    architecture = _architecture(fields)
    refuse_quantised(fields)
    _refuse_custom_code(fields)
    layers = _layers(fields, architecture)
    _refuse_windows(fields, architecture, layers.num_layers)
    vocab_size = fields.integer("vocab_size")
    for key, plain in (("is_encoder_decoder", False), ("add_cross_attention", False)):
        fields.expect(key, plain, SUPPORTED_TARGETS)
    fields.expect("pruned_heads", {}, SUPPORTED_TARGETS)
    spec = TargetSpec(
        architecture=architecture,
        layers=layers,
        vocab_size=vocab_size,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_position=fields.integer("max_position_embeddings"),
        eos_token_ids=parse_eos(folder, fields, vocab_size),
        bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        dtype=parse_dtype(fields, folder),
    )
    fields.finish(also_inert=_IGNORED[architecture])
    return spec


# Keys the architecture's own code never reads: Qwen2 always has q, k, v biases, Qwen MLPs none.
_IGNORED = {
    "LlamaForCausalLM": ("use_sliding_window", "max_window_layers"),
    "Qwen2ForCausalLM": ("attention_bias", "mlp_bias"),
    "Qwen3ForCausalLM": ("mlp_bias",),
}


def _architecture(fields: ConfigFields) -> str:
    model_type = fields.text("model_type", "")
    name = architecture_of(fields) or _BY_MODEL_TYPE.get(model_type, "")
    if "DSpark" in name or fields.raw("speculators_model_type"):
        raise fields.error(
            "architectures",
            f"is {name or fields.raw('speculators_model_type')!r}: a drafter, not a target",
            "give it as the draft; the model is the checkpoint it drafts for",
        )
    if name not in TARGET_ARCHITECTURES:
        shown = name or model_type or "missing"
        raise fields.error("architectures", f"is {shown!r}, not supported", SUPPORTED_TARGETS)
    if model_type and _BY_MODEL_TYPE.get(model_type) != name:
        raise fields.error(
            "model_type", f"is {model_type!r} but architectures is {name!r}", SUPPORTED_TARGETS
        )
    return name


def _refuse_custom_code(fields: ConfigFields) -> None:
    auto_map = fields.raw("auto_map", {})
    custom = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else auto_map
    if custom:
        raise fields.error(
            "auto_map",
            f"asks for model code {custom!r} from the checkpoint; no such code is run",
            SUPPORTED_TARGETS,
        )


def _layers(fields: ConfigFields, architecture: str) -> LayersSpec:
    llama, qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    bias = not qwen2 and fields.flag("attention_bias", False)
    return parse_layers(
        fields,
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=qwen2 or bias,
        o_bias=bias,
        mlp_bias=llama and fields.flag("mlp_bias", False),
        default_head_dim=_QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else None,
    )


def _refuse_windows(fields: ConfigFields, architecture: str, num_layers: int) -> None:
    sliding = parse_layer_types(fields, num_layers)
    window = fields.raw("sliding_window")
    # Qwen configs carry a window that use_sliding_window=false switches off; Llama has no switch.
    if any(sliding) or (architecture == "LlamaForCausalLM" and window is not None):
        count = sum(sliding) or num_layers
        raise fields.error(
            "sliding_window",
            f"is {window} and active in {count} of {num_layers} layers; "
            "targets with sliding windows are not supported",
            SUPPORTED_TARGETS + ", with full attention",
        )
    for key in ("use_sliding_window", "max_window_layers"):
        fields.raw(key)


def is_target(folder: Path) -> bool:
    """Does the folder look like a target rather than a draft? Its config decides."""
    config = read_json(folder / "config.json")
    names = config.get("architectures") or [""]
    return not ("speculators_model_type" in config or any("DSpark" in str(n) for n in names))
