"""What target and draft configs have in common: the decoder layers, rope and the dtype.

Both spellings are read: `rope_theta` + `rope_scaling` + `torch_dtype` (transformers 4.x) and
`rope_parameters` + `dtype` (5.x).
"""

from pathlib import Path
from typing import Any, cast

from engine.errors import CheckpointError
from engine.models.config import LayersSpec, RopeSpec
from engine.models.config_reader import ConfigFields, read_json
from engine.models.headers import read_headers, stored_dtype

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "llama3")
_ROPE_HINT = "use a checkpoint with rope type default, linear or llama3"

# What transformers assumes for keys a config leaves out.
_DEFAULT_THETA = 10000.0
_DEFAULT_MAX_WINDOW_LAYERS = 28


def parse_dtype(fields: ConfigFields, folder: Path) -> str:
    """The dtype the weights are stored in: the config's word, else the file's.

    Args:
        fields: config.json.
        folder: The checkpoint, for its tensors' headers when the config does not say.
    """
    name = fields.raw("dtype", fields.raw("torch_dtype"))
    if name is None:
        name = stored_dtype(read_headers(folder))
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(
            "dtype",
            f"is {name!r}; supported are {', '.join(DTYPES)}",
            "use an unquantised checkpoint",
        )
    return name


def refuse_quantised(fields: ConfigFields) -> None:
    """Refuse quantised checkpoints, naming the method."""
    for key in ("quantization_config", "compression_config"):
        value = fields.raw(key)
        if value:
            method = value.get("quant_method", "unknown") if isinstance(value, dict) else value
            raise fields.error(
                key,
                f"asks for quantisation {method!r}; only unquantised weights are supported",
                "use the unquantised checkpoint",
            )


def parse_layers(
    fields: ConfigFields,
    *,
    qk_norm: bool,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    default_head_dim: int | None,
) -> LayersSpec:
    """Read the shape of a stack of decoder layers.

    Args:
        fields: The config.
        qk_norm: Are q and k normed per head?
        qkv_bias: Do q, k, v have biases?
        o_bias: Does the attention output have one?
        mlp_bias: Do the MLP projections?
        default_head_dim: Head size when the config is silent; None divides hidden_size by heads.
    """
    act = fields.text("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise fields.error("hidden_act", f"is {act!r}; only 'silu' is supported", _SILU_HINT)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            "num_attention_heads",
            f"must be a multiple of num_key_value_heads, got {heads} and {kv_heads}",
        )
    return LayersSpec(
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, hidden, heads, default_head_dim),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=parse_rope(fields),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _head_dim(fields: ConfigFields, hidden: int, heads: int, default: int | None) -> int:
    head_dim = fields.optional_integer("head_dim") or default
    if head_dim is None and hidden % heads:
        raise fields.error(
            "hidden_size",
            f"must be a multiple of num_attention_heads, got {hidden} and {heads}",
            "add head_dim to the checkpoint's config.json",
        )
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rope, got {head_dim}")
    return head_dim


_SILU_HINT = "use a checkpoint with gated SiLU layers (Llama, Qwen2, Qwen3)"


def parse_rope(fields: ConfigFields) -> RopeSpec:
    """Read rope in the old and the new spelling; both, if both are there, must agree.

    Args:
        fields: The config.
    """
    for key in ("rope_interleaved", "use_mrope"):
        fields.expect(key, False, _ROPE_HINT)
    fields.expect("partial_rotary_factor", 1.0, _ROPE_HINT)
    theta = fields.number("rope_theta", _DEFAULT_THETA)
    old, new = fields.raw("rope_scaling"), fields.raw("rope_parameters")
    new_spec = None if new is None else _rope_from_dict(fields, "rope_parameters", new, theta)
    old_spec = None if old is None else _rope_from_dict(fields, "rope_scaling", old, theta)
    if new_spec is None:
        return old_spec or RopeSpec(theta=theta)
    if "rope_theta" in fields and theta != new_spec.theta:
        raise fields.error(
            "rope_theta",
            f"is {theta} but rope_parameters.rope_theta is {new_spec.theta}",
            "remove the wrong one from the checkpoint's config.json",
        )
    if old_spec is not None and old_spec != new_spec:
        raise fields.error(
            "rope_scaling",
            f"is {old} but rope_parameters is {new}",
            "remove the wrong one from the checkpoint's config.json",
        )
    return new_spec


def _rope_from_dict(fields: ConfigFields, key: str, value: Any, theta: float) -> RopeSpec:
    if not isinstance(value, dict):
        raise fields.error(key, f"must be an object, got {value!r}")
    rope = ConfigFields(value, f"{fields.where}: {key}")
    # transformers 4.x wrote `type` first and `rope_type` later, sometimes both.
    kind = rope.text("rope_type", rope.raw("type", "default"))
    if kind not in ROPE_KINDS:
        raise fields.error(
            key, f"asks for rope type {kind!r}; supported are {', '.join(ROPE_KINDS)}", _ROPE_HINT
        )
    theta = rope.number("rope_theta", theta)
    rope.expect("partial_rotary_factor", 1.0, _ROPE_HINT)
    rope.expect("attention_factor", 1.0, _ROPE_HINT)
    if kind == "default":
        rope.finish(also_inert=("original_max_position_embeddings",))
        return RopeSpec(theta=theta)
    if kind == "linear":
        spec = RopeSpec(theta=theta, kind="linear", factor=rope.number("factor"))
        rope.finish(also_inert=("original_max_position_embeddings",))
        return spec
    spec = RopeSpec(
        theta=theta,
        kind="llama3",
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings"),
    )
    if spec.high_freq_factor <= spec.low_freq_factor:
        raise rope.error(
            "high_freq_factor",
            f"must be above low_freq_factor {spec.low_freq_factor}, got {spec.high_freq_factor}",
        )
    rope.finish()
    return spec


def parse_layer_types(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Which layers slide, as transformers decides it; True = sliding window.

    Args:
        fields: The config.
        num_layers: Layers in the stack.
    """
    kinds = fields.raw("layer_types")
    if kinds is None:
        on = fields.flag("use_sliding_window", False)
        first = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        return tuple(on and i >= first for i in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in known for kind in kinds)
    ):
        raise fields.error(
            "layer_types", f"must be {num_layers} of {' | '.join(known)}, got {kinds!r}"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def architecture_of(fields: ConfigFields) -> str:
    """The one entry of `architectures`, or "" when the config does not say."""
    value = fields.raw("architectures", [])
    if not isinstance(value, list) or len(value) > 1 or not all(isinstance(v, str) for v in value):
        raise fields.error("architectures", f"must name one architecture, got {value!r}")
    return cast(str, value[0]) if value else ""


def check_token_id(fields: ConfigFields, key: str, token: int, vocab_size: int) -> int:
    """Refuse a token id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{fields.where}: {key} must be in [0, {vocab_size}), got {token}",
            f"fix {key}, or use the tokenizer and config of the same checkpoint",
        )
    return token


def parse_eos(folder: Path, fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json decides, config.json only if it is silent."""
    source, value = fields, fields.raw("eos_token_id")
    path = folder / "generation_config.json"
    if path.exists():
        generation = ConfigFields(read_json(path), str(path))
        if "eos_token_id" in generation:
            source, value = generation, generation.raw("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise source.error(
                "eos_token_id", f"must be an integer or a list of them, got {value!r}"
            )
        check_token_id(source, "eos_token_id", token, vocab_size)
    return tuple(dict.fromkeys(ids))
