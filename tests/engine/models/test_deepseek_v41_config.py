"""config.json of DeepSeek-V4.1 as released: two levels, layers with sources, nothing guessed."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from engine.errors import CheckpointError
from engine.models import families
from engine.models.deepseek_v4_layers import layer_shapes
from engine.models.deepseek_v4_spec import SourcesSpec, V4DraftSpec, V4TargetSpec, YarnRope
from engine.models.deepseek_v41_hashes import alike_tokens, bucket_sizes, multipliers
from engine.models.draft_config import parse_draft
from engine.models.layers import Placement
from engine.models.target_config import parse_target
from tests.engine.models.test_deepseek_v4_config import MTP, RELEASED
from tests.helpers.deepseek_v41 import write_deepseek_v41
from tests.helpers.fed import load

RATIOS = [0, 0, *[2] * 18, *[1] * 20]
GONE = ("compress_ratios", "num_hash_layers", "torch_dtype", "architectures", "model_type")
RELEASED_V41: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "image_token_id": 98,
    "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        **{key: value for key, value in RELEASED.items() if key not in GONE},
        "model_type": "deepseek_v41_text",
        "rms_norm_eps": 1e-20,
        "num_hidden_layers": 40,
        "compress_ratios": [*RATIOS, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "num_nextn_predict_layers": 3,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_n_routed_experts": 12,
        "dspark_num_experts_per_tok": 3,
        "engram_layer_ids": [],
        "engram_vocab_size": 16000000,
    },
    "vision_config": {"model_type": "deepseek_v41_vision", "hidden_size": 1024},
}


ENGRAM = {
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}


def write(folder: Path, tensors: tuple[str, ...] = (), **changes: Any) -> Path:
    """Changes are of the text; those of the outer level begin with `outer_`."""
    values = copy.deepcopy(RELEASED_V41)
    for key, value in changes.items():
        level = values if key.startswith("outer_") else values["text_config"]
        level[key.removeprefix("outer_")] = value
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: torch.zeros(1) for name in tensors}, folder / "model.safetensors")
    return folder


def test_as_released(tmp_path: Path) -> None:
    """What its config leaves out its architecture says: delayed streams, heads that are not normed,
    no experts that are looked up."""
    spec = parse_target(write(tmp_path))
    assert isinstance(spec, V4TargetSpec)
    layers = spec.layers
    assert (spec.architecture, spec.dtype) == ("DeepseekV41ForCausalLM", "bfloat16")
    assert (spec.eos_token_ids, spec.fp8_block) == ((1,), 32)
    assert layers.sources == SourcesSpec(
        ratios=tuple(RATIOS),
        entries=(2, 8, 14, 20),
        choices=(2, 8, 14, 20, 24, 28, 32, 36),
        candidates=20,
        candidate_blocks=2048,
        candidate_block_size=8,
    )
    assert [layers.ratio(i) for i in range(40)] == RATIOS
    assert layers.delayed
    assert not layers.q_head_norm
    assert not any(layers.hashed)
    assert layers.norm_eps == 1e-20
    compressed = YarnRope(theta=160000.0, factor=16.0, original_max_position=65536)
    assert layers.rope(0) == YarnRope(theta=10000.0)
    assert layers.rope(39) == layers.rope(2) == compressed, "a ratio of 1 is one above 0"


def test_sources_keep_for_all_after_them(tmp_path: Path) -> None:
    """40 layers of which four keep entries: 2.5 a token in all, where each its own would be 29."""
    spec = parse_target(write(tmp_path))
    assert isinstance(spec, V4TargetSpec)
    sources = spec.layers.sources
    assert sources is not None
    seen = [sources.entries_of(layer) for layer in (2, 7, 8, 19, 20, 39)]
    assert seen == [2, 2, 8, 14, 20, 20]
    shapes = layer_shapes(spec.layers)
    assert [i for i, shape in enumerate(shapes) if shape.compressors] == [2, 8, 14, 20]
    a_block = sum(shape.bytes_a_block(64, 2) for shape in shapes)
    assert a_block == 64 * 2.5 * (32 + 16) * 2
    assert families.block_size(spec, 16) == 16


def test_its_drafter_taps_before_its_layers(tmp_path: Path) -> None:
    spec = parse_draft(write(tmp_path, MTP))
    assert isinstance(spec, V4DraftSpec)
    assert spec.layers.kinds == ("window",) * 3
    assert (spec.taps, spec.num_target_layers, spec.fp8_block) == ((37, 38, 39), 40, 32)
    assert (spec.layers.experts.num_experts, spec.layers.experts.per_token) == (12, 3)
    assert spec.layers.sources is None
    assert spec.layers.delayed


def test_tables_of_n_grams_are_as_large_as_released_ones(tmp_path: Path) -> None:
    """24 primes a layer, from 16 million up: their sums are what its config says of rows."""
    (tmp_path / "tokenizer.json").touch()
    spec = parse_target(write(tmp_path, **ENGRAM))
    assert isinstance(spec, V4TargetSpec)
    assert spec.engram is not None
    assert spec.lookback == 3
    assert [len(sizes) for sizes in spec.engram.buckets] == [24, 24]
    assert len({n for sizes in spec.engram.buckets for n in sizes}) == 48
    at = Placement(torch.bfloat16, torch.device("meta"))
    assert json.dumps(asdict(spec)), "ranks tell each other shapes, with what rounds cost"
    without = parse_target(write(tmp_path))
    assert families.bytes_a_row(spec, 6, at) - families.bytes_a_row(without, 6, at) == 9 * 8


def test_tokens_that_read_alike_share_a_number(tmp_path: Path) -> None:
    tokens = ["the", "Ġthe", "ĠTHE", "Ġ", "ĠĠ", "Ċ", "é", "e", "fi", "Ã", "Â", "ĠÃ©"]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))
    found = alike_tokens(tmp_path / "tokenizer.json")
    # one space, two, a new line: the same; halves of a letter: each its own; " é": an e
    assert found == [0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 3]


def test_products_with_hash_numbers_stay_below_64_bits() -> None:
    for layer in (1, 14):
        numbers = multipliers(layer, 4, 99092)
        assert all(n % 2 and n * 99091 < 1 << 63 for n in numbers)
    assert multipliers(1, 4, 99092) != multipliers(14, 4, 99092)
    assert bucket_sizes(1, 2, 2, 7) == [(7, 11, 13, 17)]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Its n-grams would be other rows, and nothing would fail."""
    folder = write_deepseek_v41(tmp_path / "v41")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tokens that read differently, config") as told:
        load(folder)
    assert told.value.hint == "use the tokenizer of the same checkpoint"


def test_one_level_means_the_same(tmp_path: Path) -> None:
    """Also where only `model_type` says what it is."""
    want = parse_target(write(tmp_path))
    flat = {**RELEASED_V41, **RELEASED_V41["text_config"], "model_type": "deepseek_v41"}
    kept = {k: v for k, v in flat.items() if k not in ("text_config", "vision_config")}
    for gone in ((), ("architectures",)):
        values = {k: v for k, v in kept.items() if k not in gone}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert parse_target(tmp_path) == want


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outer_hidden_size": 65}, "hidden_size is 65, in text_config it is 64"),
        ({"outer_model_type": "deepseek_v4"}, "model_type is 'deepseek_v4' but architectures is"),
        ({"compress_ratios": None}, "compress_ratios is missing"),
        ({"compress_ratios": [4] * 40}, "must be 0, 1 or 2 for each of 40 layers"),
        ({"compress_ratios": RATIOS[:39]}, "must be 0, 1 or 2 for each of 40 layers"),
        ({"compress_ratios": [*RATIOS, 1]}, "0 for those of a drafter"),
        ({"kv_source_layer_ids": None}, "kv_source_layer_ids is missing"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "layer 2 sees entries of 2 tokens, and the last"),
        ({"kv_source_layer_ids": [2, 8, 14]}, "before it is layer 14, of 2 tokens each"),
        ({"kv_source_layer_ids": [2, 8, 14, 20, 21]}, "must have all of kv_source_layer_ids"),
        ({"kv_source_layer_ids": [20, 2]}, "kv_source_layer_ids must ascend"),
        ({"kv_source_layer_ids": [0, 2]}, "names layers [0], whose compress_ratios are 0"),
        ({"index_source_layer_ids": [2, 40]}, "stay below num_hidden_layers=40, got [2, 40]"),
        ({"candidate_source_layer_id": 21}, "must be in index_source_layer_ids"),
        ({"candidate_source_layer_id": 8}, "layer 20 makes entries of its own after it"),
        ({"candidate_source_layer_id": "20"}, "must be a layer, or -1 for none, got '20'"),
        ({"candidate_topk_blocks": None}, "candidate_topk_blocks is missing"),
        ({"candidate_topk_blocks": 64}, "64 of 8 entries, of which the newest may hold one"),
        ({"engram_layer_ids": [1, 14]}, "engram_num_embeddings is missing"),
        ({**ENGRAM, "engram_layer_ids": [14, 1]}, "engram_layer_ids must ascend and stay below"),
        ({**ENGRAM, "engram_n_heads": 7}, "is [384006168, 384016682], but hashes reach [33600"),
        ({**ENGRAM, "engram_max_ngram_size": 1}, "must be an integer >= 2, got 1"),
        ({**ENGRAM, "engram_pad_token_id": 100}, "engram_pad_token_id must be in [0, 100)"),
        (ENGRAM, "depends on tokenizer.json, which is not there"),
        ({"gate_temp": 0.5}, "gate_temp is 0.5"),
        ({"new_key": 3}, "unknown keys that may change the computation: new_key=3"),
        (
            {"outer_quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size is [64, 64]; blocks of (128, 32) are served",
        ),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        parse_target(write(tmp_path, **changes))
    assert said in f"{refused.value} {refused.value.hint}"


def test_windows_alone_need_no_sources(tmp_path: Path) -> None:
    unsaid = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")
    spec = parse_target(write(tmp_path, compress_ratios=[0] * 40, **dict.fromkeys(unsaid)))
    assert isinstance(spec, V4TargetSpec)
    assert spec.layers.kinds == ("window",) * 40


def test_tensors_of_images_are_left_alone(tmp_path: Path) -> None:
    target, draft = parse_target(write(tmp_path, MTP)), parse_draft(tmp_path)
    for name in ("vision.blocks.0.w", "aligner.w", "image_newline", "layers.3.ffn.gate.bias_vl"):
        assert families.belongs_elsewhere(target, name)
        assert families.belongs_elsewhere(draft, name)
    assert families.belongs_elsewhere(draft, "mtp.0.ffn.gate.bias_vl")
    assert not families.belongs_elsewhere(draft, "mtp.0.ffn.gate.bias")
    assert not families.belongs_elsewhere(target, "layers.3.ffn.gate.bias")
