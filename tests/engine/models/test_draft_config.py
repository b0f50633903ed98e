"""config.json of a drafter: both formats mean the same network by different numbers."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.models.draft_config import draft_format, parse_draft
from engine.models.target_config import is_target
from tests.helpers.checkpoints import DROP, edit_json, write_draft

FORMATS = ("deepspec", "speculators")
NESTED = "transformer_layer_config."


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("taps", [(1, 3), (0, 2, 3), (2,)])
def test_taps_are_h_j_in_both_formats(tmp_path: Path, fmt: str, taps: tuple[int, ...]) -> None:
    spec = parse_draft(write_draft(tmp_path, fmt, taps=taps))
    assert spec.taps == taps
    assert spec.num_target_layers == (3 if fmt == "deepspec" else None)
    assert draft_format(tmp_path) == fmt
    assert not is_target(tmp_path)


def test_speculators_id_is_one_above_deepspecs_for_the_same_tap(tmp_path: Path) -> None:
    write_draft(tmp_path / "a", "deepspec")
    write_draft(tmp_path / "b", "speculators")
    edit_json(tmp_path / "a/config.json", {"target_layer_ids": [-1, 1]})
    edit_json(tmp_path / "b/config.json", {"aux_hidden_state_layer_ids": [0, 2]})
    assert parse_draft(tmp_path / "a").taps == parse_draft(tmp_path / "b").taps == (0, 2)


def test_speculators_taps_are_served_in_ascending_order(tmp_path: Path) -> None:
    write_draft(tmp_path, "speculators")
    edit_json(tmp_path / "config.json", {"aux_hidden_state_layer_ids": [3, 0, 2]})
    assert parse_draft(tmp_path).taps == (0, 2, 3)


@pytest.mark.parametrize(
    ("fmt", "written", "anchor"),
    [
        ("deepspec", True, True),
        ("deepspec", False, True),
        ("deepspec", True, False),
        ("speculators", True, True),
        ("speculators", True, False),
        ("speculators", False, False),
    ],
)
def test_both_layouts_and_each_formats_default(
    tmp_path: Path, fmt: str, written: bool, anchor: bool
) -> None:
    spec = parse_draft(write_draft(tmp_path, fmt, sample_from_anchor=anchor, write_layout=written))
    assert spec.sample_from_anchor is anchor
    assert spec.num_speculative_tokens == 4


def test_a_speculators_file_whose_token_count_denies_its_layout_is_refused(tmp_path: Path) -> None:
    # Guessing the layout wrongly costs all acceptance and raises nothing.
    write_draft(tmp_path, "speculators", sample_from_anchor=True, write_layout=False)
    with pytest.raises(
        CheckpointError, match=r"block_size=4 drafts 3 tokens, but .* is 4"
    ) as error:
        parse_draft(tmp_path)
    assert "sample_from_anchor" in error.value.hint


def test_a_speculators_file_may_propose_fewer_tokens_than_trained(tmp_path: Path) -> None:
    write_draft(tmp_path, "speculators", gamma=7)
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    edit_json(tmp_path / "config.json", {"speculators_config.proposal_methods": methods})
    assert parse_draft(tmp_path).num_speculative_tokens == 7


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("markov", ["none", "vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    ("confidence", "with_markov"), [(False, False), (True, False), (True, True)]
)
def test_heads(tmp_path: Path, fmt: str, markov: str, confidence: bool, with_markov: bool) -> None:
    with_markov = with_markov and markov != "none"
    spec = parse_draft(
        write_draft(
            tmp_path, fmt, markov=markov, confidence=confidence, confidence_with_markov=with_markov
        )
    )
    assert (spec.markov, spec.markov_rank) == (markov, 0 if markov == "none" else 8)
    assert (spec.has_confidence, spec.confidence_with_markov) == (confidence, with_markov)


@pytest.mark.parametrize("fmt", FORMATS)
def test_absent_heads_are_none(tmp_path: Path, fmt: str) -> None:
    write_draft(tmp_path, fmt)
    keys = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    )
    edit_json(tmp_path / "config.json", dict.fromkeys(keys, DROP))
    spec = parse_draft(tmp_path)
    assert (spec.markov, spec.markov_rank, spec.has_confidence) == ("none", 0, False)


@pytest.mark.parametrize(
    ("windows", "non_causal", "causal"),
    [
        (None, False, (False, False)),
        ((16, 0), False, (True, False)),
        ((16, 16), False, (True, True)),
        ((16, 0), True, (False, False)),
    ],
)
def test_windows_are_as_trained(
    tmp_path: Path, windows: tuple[int, ...] | None, non_causal: bool, causal: tuple[bool, ...]
) -> None:
    folder = write_draft(tmp_path, "speculators", windows=windows, window_non_causal=non_causal)
    spec = parse_draft(folder)
    assert spec.windows == (windows or (0, 0))
    assert spec.causal == causal


def test_nested_config_leaves_out_its_classs_defaults(tmp_path: Path) -> None:
    write_draft(tmp_path, "speculators", head_dim=128)
    edit_json(
        tmp_path / "config.json",
        {f"{NESTED}{k}": DROP for k in ("head_dim", "max_position_embeddings", "model_type")},
    )
    spec = parse_draft(tmp_path)
    assert (spec.layers.head_dim, spec.max_position) == (128, 32768)


def test_nested_rope_per_layer_type_is_the_sliding_one(tmp_path: Path) -> None:
    write_draft(tmp_path, "speculators", windows=(16, 16))
    ropes = {"sliding_attention": {"rope_theta": 5e5}, "full_attention": {"rope_theta": 1e6}}
    edit_json(tmp_path / "config.json", {NESTED + "rope_parameters": ropes})
    assert parse_draft(tmp_path).layers.rope.theta == 5e5


def test_llama_layers_in_speculators_still_norm_q_and_k(tmp_path: Path) -> None:
    write_draft(tmp_path, "speculators")
    edit_json(tmp_path / "config.json", {NESTED + "model_type": "llama"})
    assert parse_draft(tmp_path).layers.qk_norm


def test_shapes_and_vocabularies(tmp_path: Path) -> None:
    spec = parse_draft(
        write_draft(
            tmp_path,
            "speculators",
            draft_vocab_size=64,
            target_hidden_size=48,
            attention_bias=True,
            dtype="bfloat16",
        )
    )
    assert (spec.vocab_size, spec.draft_vocab_size, spec.target_hidden_size) == (128, 64, 48)
    assert spec.layers.qkv_bias
    assert spec.layers.o_bias
    assert (spec.mask_token_id, spec.dtype, spec.max_position) == (2, "bfloat16", 512)


SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fmt", "changes", "message", "hint"),
    [
        (
            "deepspec",
            {"architectures": ["Gemma4DSparkModel"]},
            "'Gemma4DSparkModel', not supp",
            "supported d",
        ),
        (
            "deepspec",
            {"architectures": ["DSparkDraftModel"]},
            "'DSparkDraftModel', not supp",
            "supported d",
        ),
        (
            "deepspec",
            {"architectures": ["MixtralForCausalLM"], "dspark_block_size": 5},
            "'MixtralForCausalLM', not supported",
            "supported d",
        ),
        (
            "deepspec",
            {"architectures": ["LlamaForCausalLM"]},
            "a target, not a drafter",
            "DSpark checkpoint",
        ),
        (
            "deepspec",
            {"model_type": "gemma4"},
            "model_type is 'gemma4', not supported",
            "supported d",
        ),
        ("deepspec", {"layer_types": SLIDING}, "trained on the full context", "speculators"),
        (
            "deepspec",
            {"target_layer_ids": [2, 1]},
            r"must ascend .*, got \[2, 1\]",
            "fix target_layer",
        ),
        (
            "deepspec",
            {"target_layer_ids": [1, 1]},
            r"must ascend .*, got \[1, 1\]",
            "fix target_layer",
        ),
        (
            "deepspec",
            {"target_layer_ids": [0, 3]},
            r"below num_target_layers=3, got \[0, 3\]",
            "fix",
        ),
        ("deepspec", {"target_layer_ids": [-2]}, r"integers >= -1, got \[-2\]", "fix target_layer"),
        ("deepspec", {"target_layer_ids": []}, r"integers >= -1, got \[\]", "fix target_layer"),
        (
            "deepspec",
            {"mask_token_id": 128},
            r"mask_token_id must be in \[0, 128\), got 128",
            "same check",
        ),
        ("deepspec", {"mask_token_id": DROP}, "mask_token_id is missing", "add mask_token_id"),
        (
            "deepspec",
            {"block_size": 0},
            "block_size must be an integer >= 1, got 0",
            "fix block_size",
        ),
        (
            "deepspec",
            {"block_size": 1, "sample_from_anchor": False},
            "integer >= 2, got 1",
            "fix block",
        ),
        (
            "deepspec",
            {"markov_head_type": "lstm"},
            "is 'lstm'; supported are none, vanilla",
            "supported",
        ),
        ("deepspec", {"markov_rank": 0}, "is true but markov_rank is 0", "consistent"),
        (
            "deepspec",
            {"quantization_config": {"quant_method": "awq"}},
            "quantisation 'awq'",
            "unquant",
        ),
        (
            "deepspec",
            {"dflash_config": {"mask_token_id": 4}},
            "computation: dflash_config=",
            "supported",
        ),
        ("deepspec", {"hidden_act": "gelu"}, "hidden_act is 'gelu'", "SiLU"),
        ("deepspec", {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'", "llama3"),
        (
            "speculators",
            {"speculators_model_type": "eagle3"},
            "'eagle3', not supported",
            "supported d",
        ),
        (
            "speculators",
            {"speculators_model_type": "dflash"},
            "'dflash', not supported",
            "supported d",
        ),
        (
            "speculators",
            {NESTED + "model_type": "gemma4"},
            "'gemma4', not supported",
            "supported d",
        ),
        ("speculators", {"transformer_layer_config": DROP}, "must be an object, got None", "fix"),
        (
            "speculators",
            {"aux_hidden_state_layer_ids": [1, 1]},
            r"must not repeat, got \[1, 1\]",
            "fix",
        ),
        (
            "speculators",
            {"aux_hidden_state_layer_ids": [-1]},
            r"integers >= 0, got \[-1\]",
            "fix aux",
        ),
        (
            "speculators",
            {"draft_vocab_size": DROP},
            "draft_vocab_size is missing",
            "add draft_vocab",
        ),
        (
            "speculators",
            {NESTED + "layer_types": SLIDING},
            "sliding_window is missing",
            "add sliding_w",
        ),
        (
            "speculators",
            {NESTED + "some_gate": 2},
            "may change the computation: some_gate=2",
            "supported",
        ),
        (
            "speculators",
            {"aux_scale": 2.0},
            "may change the computation: aux_scale=2.0",
            "supported",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, fmt: str, changes: dict[str, Any], message: str, hint: str
) -> None:
    write_draft(tmp_path, fmt)
    edit_json(tmp_path / "config.json", changes)
    with pytest.raises(CheckpointError, match=message) as error:
        parse_draft(tmp_path)
    assert hint in error.value.hint
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": DROP, NESTED + "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": DROP}, "float32"),
    ],
)
def test_dtype_comes_from_the_top_the_decoder_or_the_file(
    tmp_path: Path, changes: dict[str, Any], dtype: str
) -> None:
    write_draft(tmp_path, "speculators")
    edit_json(tmp_path / "config.json", changes)
    assert parse_draft(tmp_path).dtype == dtype
