"""config.json of a target: read as transformers 4 and 5 write it, refused by name otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.models.config import RopeSpec
from engine.models.target_config import is_target, parse_target
from tests.helpers.checkpoints import DROP, edit_json, write_target

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_SPEC = RopeSpec(
    theta=5e5,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=64,
)


def write(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    config = {k: v for k, v in {**base, **changes}.items() if v is not DROP}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("architecture", "options", "flags"),
    [
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {"head_dim": 16}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_what_transformers_saves_is_understood(
    tmp_path: Path, architecture: str, options: dict[str, Any], flags: tuple[bool, ...]
) -> None:
    spec = parse_target(write_target(tmp_path, architecture, tokenizer=False, **options))
    layers = spec.layers
    assert (layers.qkv_bias, layers.o_bias, layers.mlp_bias, layers.qk_norm) == flags
    assert layers.head_dim == options.get("head_dim", 8)
    assert (layers.num_layers, layers.hidden_size, layers.intermediate_size) == (3, 32, 64)
    assert (layers.num_heads, layers.num_kv_heads, spec.vocab_size) == (4, 2, 128)
    assert (spec.architecture, spec.dtype, spec.tie_embeddings) == (architecture, "float32", False)
    assert (spec.eos_token_ids, spec.bos_token_id, spec.max_position) == ((1,), 0, 512)
    assert is_target(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeSpec(theta=1e4)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, RopeSpec(theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(theta=1e4, kind="linear", factor=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}}, LLAMA3_SPEC),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeSpec(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeSpec(theta=5e5)),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
            LLAMA3_SPEC,
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE},
            },
            LLAMA3_SPEC,
        ),
    ],
)
def test_rope_in_old_and_new_spelling(
    tmp_path: Path, changes: dict[str, Any], expected: RopeSpec
) -> None:
    assert parse_target(write(tmp_path, LLAMA, **changes)).layers.rope == expected


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 1, (1,)),
        (None, [1, 5], (1, 5)),
        (None, None, ()),
        ({"eos_token_id": 7}, 1, (7,)),
        ({"eos_token_id": [7, 9, 7]}, 1, (7, 9)),
        ({"eos_token_id": None}, 1, (1,)),
        ({"bos_token_id": 0}, 1, (1,)),
        ({"eos_token_id": 7}, None, (7,)),
    ],
)
def test_generation_config_decides_the_end_of_sequence(
    tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    write(tmp_path, LLAMA, eos_token_id=config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert parse_target(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("base", "changes", "head_dim"),
    [
        (LLAMA, {}, 8),
        (LLAMA, {"head_dim": 16}, 16),
        (LLAMA, {"head_dim": None}, 8),
        (QWEN2, {}, 8),
        (QWEN3, {"head_dim": DROP}, 128),
    ],
)
def test_head_dim_defaults_are_each_architectures_own(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], head_dim: int
) -> None:
    assert parse_target(write(tmp_path, base, **changes)).layers.head_dim == head_dim


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (LLAMA, {"pretraining_tp": 1, "use_cache": True, "_name_or_path": "x", "max_length": 20}),
        (LLAMA, {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {}}),
        (LLAMA, {"num_key_value_heads": DROP, "architectures": DROP}),
        (LLAMA, {"some_future_key": None}),
        (QWEN2, {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28}),
        (QWEN2, {"use_mrope": False, "layer_types": ["full_attention"] * 3}),
        (QWEN2, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}),
        (QWEN3, {"quantization_config": None}),
    ],
)
def test_inert_keys_are_accepted(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    parse_target(write(tmp_path, base, **changes))


FULL, SLIDE = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("base", "changes", "message", "hint"),
    [
        (
            LLAMA,
            {"architectures": ["MixtralForCausalLM"]},
            "'MixtralForCausalLM', not supp",
            "Qwen3F",
        ),
        (
            LLAMA,
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "'Qwen3MoeForCausalLM'",
            "LlamaForCausal",
        ),
        (
            LLAMA,
            {"architectures": DROP, "model_type": "gpt2"},
            "'gpt2', not supported",
            "supported t",
        ),
        (LLAMA, {"architectures": ["A", "B"]}, r"one architecture, got \['A', 'B'\]", "fix archit"),
        (LLAMA, {"model_type": "qwen2"}, "'qwen2' but architectures is 'LlamaFor", "supported"),
        (LLAMA, {"architectures": ["Qwen3DSparkModel"]}, "a drafter, not a target", "as the draft"),
        (
            LLAMA,
            {"architectures": DROP, "speculators_model_type": "dspark"},
            "a drafter",
            "as the draft",
        ),
        (
            LLAMA,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantisation 'fp8'",
            "unquantised",
        ),
        (LLAMA, {"auto_map": {"AutoModelForCausalLM": "m.X"}}, "model code 'm.X'", "supported"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'", "SiLU"),
        (LLAMA, {"num_experts": 8}, "may change the computation: num_experts=8", "supported arch"),
        (
            LLAMA,
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping=30.0",
            "supported arch",
        ),
        (LLAMA, {"sliding_window": 64}, "is 64 and active in 3 of 3 layers", "full attention"),
        (
            QWEN2,
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
            "is 64 and active in 2 of 3 layers",
            "full attention",
        ),
        (
            QWEN3,
            {"sliding_window": 64, "layer_types": [FULL, SLIDE, FULL]},
            "active in 1 of 3",
            "full",
        ),
        (QWEN3, {"layer_types": [FULL]}, "layer_types must be 3 of", "fix layer_types"),
        (QWEN3, {"layer_types": ["linear_attention"] * 3}, "layer_types must be 3 of", "fix"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'", "llama3"),
        (
            LLAMA,
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope type 'dynamic'",
            "llama3",
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling: factor is missing",
            "add factor",
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "factor must be a number > 0, got 0",
            "fix",
        ),
        (LLAMA, {"rope_scaling": 4}, "rope_scaling must be an object, got 4", "fix rope_scaling"),
        (
            LLAMA,
            {"rope_parameters": {"rope_theta": 5e5, "mrope_section": [1]}},
            "mrope_section",
            "arch",
        ),
        (
            LLAMA,
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "10000.0 but rope_parameters.rope_theta is 500000.0",
            "remove the wrong one",
        ),
        (
            LLAMA,
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_theta": 1e4},
            },
            "rope_scaling is .* but rope_parameters is",
            "remove the wrong one",
        ),
        (
            LLAMA,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; only 1.0",
            "rope type",
        ),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved is True; only False", "rope type"),
        (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder is True", "supported"),
        (LLAMA, {"hidden_size": DROP}, "hidden_size is missing", "add hidden_size"),
        (
            LLAMA,
            {"hidden_size": "32"},
            "hidden_size must be an integer >= 1, got '32'",
            "fix hidden_size",
        ),
        (
            LLAMA,
            {"hidden_size": 33},
            "multiple of num_attention_heads, got 33 and 4",
            "add head_dim",
        ),
        (LLAMA, {"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3", "fix"),
        (LLAMA, {"num_hidden_layers": True}, "must be an integer >= 1, got True", "fix"),
        (LLAMA, {"head_dim": 7}, "head_dim must be even for rope, got 7", "fix head_dim"),
        (LLAMA, {"tie_word_embeddings": 1}, "must be true or false, got 1", "fix"),
        (
            LLAMA,
            {"torch_dtype": "float8_e4m3fn"},
            "is 'float8_e4m3fn'; supported are float32",
            "unquant",
        ),
        (
            LLAMA,
            {"eos_token_id": 128},
            r"eos_token_id must be in \[0, 128\), got 128",
            "same checkpoint",
        ),
        (LLAMA, {"eos_token_id": "x"}, "integer or a list of them, got 'x'", "fix eos_token_id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        parse_target(write(tmp_path, base, **changes))
    assert hint in error.value.hint
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot read"),
        ("[]", "must hold a JSON object, got list"),
    ],
)
def test_a_broken_config_is_one_clear_error(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        parse_target(tmp_path)
    assert error.value.hint


def test_a_silent_config_takes_the_dtype_of_the_file(tmp_path: Path) -> None:
    write_target(tmp_path, dtype="bfloat16", tokenizer=False)
    edit_json(tmp_path / "config.json", {"dtype": DROP})
    assert parse_target(tmp_path).dtype == "bfloat16"
