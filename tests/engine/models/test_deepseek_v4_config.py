"""config.json of DeepSeek-V4: both spellings, nothing guessed, other variants refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import AttentionParallel
from engine.errors import CheckpointError, ConfigError
from engine.models import families
from engine.models.deepseek_v4_layers import dealt_numbers
from engine.models.deepseek_v4_names import spellings
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec, YarnRope
from engine.models.draft_config import parse_draft
from engine.models.interface import AnyTarget
from engine.models.shapes import target_shape
from engine.models.target_config import parse_target

RELEASED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 4,
    "o_lora_rank": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 0, 0],
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1 << 20,
    "num_nextn_predict_layers": 1,
    "eos_token_id": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 99,
    "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 7,
}
GONE = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "rope_theta")
MODERN = {
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000,
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "attention_factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
}


def write(folder: Path, tensors: tuple[str, ...] = (), **changes: Any) -> Path:
    values = {**RELEASED, **changes}
    kept = {key: value for key, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    save_file({name: torch.zeros(1) for name in tensors}, folder / "model.safetensors")
    return folder


def test_the_released_spelling(tmp_path: Path) -> None:
    spec = parse_target(write(tmp_path))
    assert isinstance(spec, V4TargetSpec)
    layers = spec.layers
    assert layers.kinds == ("window", "window", "sparse", "heavy", "sparse")
    assert [layers.ratio(i) for i in range(5)] == [0, 0, 4, 128, 4]
    assert layers.hashed == (True, True, True, False, False)
    assert (layers.rope_dim, layers.indexer.top_k, layers.experts.limit) == (8, 512, 10.0)
    assert layers.rope(0) == YarnRope(theta=10000.0)
    assert layers.rope(3) == YarnRope(theta=160000.0, factor=16.0, original_max_position=65536)
    assert (spec.dtype, spec.eos_token_ids) == ("bfloat16", (1,))


def test_delayed_streams_are_said_by_two_keys(tmp_path: Path) -> None:
    """Then taps are taken before their layers, and the drafter may have experts of its own."""
    more = {"hc_pre_from_prev_sublayer": True, "q_head_norm": False}
    own = {"dspark_n_routed_experts": 12, "dspark_num_experts_per_tok": 3}
    spec = parse_draft(write(tmp_path, MTP, **more, **own))
    assert isinstance(spec, V4DraftSpec)
    assert spec.layers.delayed
    assert not spec.layers.q_head_norm
    assert spec.taps == (2, 3, 4)
    assert (spec.layers.experts.num_experts, spec.layers.experts.per_token) == (12, 3)
    assert parse_target(tmp_path).layers.experts.num_experts == 16


def test_transformers_spelling_means_the_same(tmp_path: Path) -> None:
    want = parse_target(write(tmp_path))
    assert parse_target(write(tmp_path, **dict.fromkeys(GONE), **MODERN)) == want
    assert parse_target(write(tmp_path, **MODERN)) == want, "both, where they agree"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compress_ratios": None}, "compress_ratios is missing, and so is layer_types"),
        ({"compress_ratios": [0, 0, 2, 2, 1]}, "ratios 1 and 2 are V4.1's: its configs say"),
        ({"compress_ratios": [0, 0, 4, 128]}, "must be 0, 4 or 128 for each of 5 layers"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 4]}, "0 for those of a drafter"),
        ({**MODERN, "compress_ratios": [0] * 5}, "does not agree with layer_types"),
        ({**MODERN, "layer_types": ["full_attention"] * 5, "compress_ratios": None}, "layer_types"),
        ({"num_hash_layers": None}, "num_hash_layers is missing, and so is mlp_layer_types"),
        ({"qk_rope_head_dim": 16, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "group_limited"}, "topk_method is 'group_limited'"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"num_experts_per_tok": 17}, "must be at most n_routed_experts 16, got 17"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"o_groups": 3}, "must be a multiple of o_groups, got 8 and 3"),
        ({"kv_source_layer_ids": [2, 8]}, "kv_source_layer_ids=[2, 8]"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"rope_scaling": {"type": "longrope"}}, "asks for rope type 'longrope'"),
        ({**MODERN, "rope_scaling": {"type": "default"}}, "does not agree with rope_parameters"),
        ({"engram_layers": [1, 14]}, "engram_layers=[1, 14]"),
        ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41'"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        parse_target(write(tmp_path, **changes))
    assert said in f"{refused.value} {refused.value.hint}"


MTP = ("mtp.0.main_proj.weight", "mtp.1.norm.weight", "mtp.2.confidence_head.proj.weight")


def test_the_drafter_is_what_its_tensors_say(tmp_path: Path) -> None:
    """Three stages although the config speaks of one prediction layer; taps after the layers."""
    spec = parse_draft(write(tmp_path, MTP))
    assert isinstance(spec, V4DraftSpec)
    assert spec.layers.kinds == ("window",) * 3
    assert not any(spec.layers.hashed)
    assert (spec.taps, spec.num_speculative_tokens, spec.mask_token_id) == ((3, 4, 5), 5, 99)
    assert spec.has_confidence
    assert not parse_draft(write(tmp_path, MTP, enable_confidence_head=False)).has_confidence
    without = parse_draft(write(tmp_path, (*MTP[:2], "mtp.2.norm.weight")))
    assert not without.has_confidence


@pytest.mark.parametrize(
    ("tensors", "changes", "said"),
    [
        ((), {}, "there is no tensor mtp.0.main_proj.weight"),
        (("mtp.0.e_proj.weight",), {}, "mtp.0.e_proj is the older prediction layer"),
        (("mtp.0.main_proj.weight", "mtp.2.norm.weight"), {}, "stages [0, 2] are not numbered"),
        (MTP, {"dspark_target_layer_ids": [3, 5]}, "must ascend and stay below num_hidden_layers"),
        (MTP, {"dspark_target_layer_ids": [3, 2]}, "must ascend"),
        (MTP, {"sample_from_anchor": False}, "sample_from_anchor is False"),
        (MTP, {"dspark_noise_token_id": 100}, "dspark_noise_token_id must be in [0, 100)"),
        (MTP, {"dspark_block_size": None}, "dspark_block_size is missing"),
        (MTP, {"dspark_num_experts_per_tok": 17}, "at most the draft's 16 experts, got 17"),
    ],
)
def test_drafters_that_are_not_served_are_named(
    tmp_path: Path, tensors: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        parse_draft(write(tmp_path, tensors, **changes))
    assert said in str(refused.value)


def test_ranks_and_families_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, MTP)
    target, draft = parse_target(folder), parse_draft(folder)
    for size in (1, 2, 4):
        families.check_ranks(target, size, "the target")
    with pytest.raises(ConfigError, match=r"8 heads in 4 output groups") as refused:
        families.check_ranks(target, 3, "the target")
    assert refused.value.hint == "use -tp 1 or 2 or 4, or --attention-parallel data"
    families.check_ranks(target, 3, "the target", data_attention=True)
    families.check_family(target, draft)
    dense = target_shape("shape:qwen3-8b")
    with pytest.raises(ConfigError, match="of different families"):
        families.check_family(dense, draft)
    assert families.block_size(target, 16) == 128, "a block holds whole windows"
    assert families.block_size(dense, 16) == 16


def test_what_ranks_share_of_attention(tmp_path: Path) -> None:
    """As asked; auto by memory: a copy of the weights against all that requests keep."""
    folder = write(tmp_path, MTP)
    target, draft = parse_target(folder), parse_draft(folder)
    dense = target_shape("shape:qwen3-8b")

    def shared(spec: AnyTarget, asked: AttentionParallel, size: int, kept: int) -> bool:
        return families.shares_requests(spec, draft, asked, size, lambda: kept, 2)

    weights = 2 * (dealt_numbers(target.layers) + dealt_numbers(draft.layers))
    assert [shared(target, "auto", 2, weights + n) for n in (-1, 0, 1)] == [False, False, True]
    assert shared(target, "data", 2, 0)
    assert not shared(target, "data", 1, 0), "one rank has all requests anyway"
    assert not shared(target, "tensor", 2, 1 << 50)
    assert not shared(dense, "auto", 2, 1 << 50)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM is dense") as refused:
        shared(dense, "data", 2, 0)
    assert "--data-parallel-size" in str(refused.value.hint)


def test_spellings_of_names() -> None:
    assert spellings("head.weight") == ("head.weight", "lm_head.weight")
    assert spellings("layers.3.attn.kv_norm.weight") == (
        "layers.3.attn.kv_norm.weight",
        "model.layers.3.attn.kv_norm.weight",
        "model.layers.3.attn.norm.weight",
        "model.layers.3.self_attn.kv_norm.weight",
    )
    own = "model.layers.2.self_attn.compressor.indexer.position_bias"
    assert spellings("layers.2.attn.indexer.compressor.ape")[-1] == own
    assert spellings("mtp.0.attn.wkv.weight")[0] == "mtp.0.attn.wkv.weight"
