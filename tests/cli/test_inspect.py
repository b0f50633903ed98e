"""`dspark inspect`: what a checkpoint is, whether a pair fits, what memory it takes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_cli.dryrun import Bounds
from dspark_cli.inspect import human
from dspark_cli.main import run
from engine.deepseek_v4_inspection import gpus_needed, weight_bytes
from engine.models.deepseek_v4_layers import dealt_numbers
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.draft_config import parse_draft
from engine.models.target_config import parse_target
from tests.helpers.checkpoints import (
    edit_json,
    read_tensors,
    write_draft,
    write_target,
    write_tensors,
)
from tests.helpers.deepseek_v4 import write_deepseek_v4
from tests.helpers.deepseek_v41 import write_deepseek_v41

EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("t"), "Qwen3ForCausalLM", dtype="bfloat16")


def inspect(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one call."""
    with pytest.raises(SystemExit) as exit_info:
        run(["inspect", *map(str, argv)])
    out, err = capsys.readouterr()
    code = exit_info.value.code
    return int(code or 0), out, err


def as_json(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 0) -> dict[str, Any]:
    got, out, err = inspect(capsys, *argv, "--json")
    assert (got, err) == (code, "")
    report: dict[str, Any] = json.loads(out)
    return report


def test_a_target_alone(capsys: pytest.CaptureFixture[str], target: Path) -> None:
    report = as_json(capsys, target)
    found, memory = report["target"], report["memory"]
    assert (report["draft"], report["pair"]) == (None, None)
    assert (found["format"], found["dtype"], found["tensors"]) == (
        "Qwen3ForCausalLM",
        "bfloat16",
        36,
    )
    numbers = sum(t.numel() for t in read_tensors(target).values())
    assert found["parameters"] == numbers
    assert found["file_bytes"] == 2 * numbers
    assert (memory["max_num_seqs"], memory["max_model_len"]) == (32, 512)
    assert memory["bfloat16"]["weight_bytes"] == {"target": 2 * numbers, "draft": 0}
    # K and V of 3 layers, 2 heads, 8 wide
    assert memory["float32"]["kv_bytes_per_token"] == {"target": 2 * 3 * 2 * 8 * 4, "draft": 0}
    assert memory["float32"]["kv_bytes"] == 384 * 32 * 512


def test_the_plan_is_for_the_requests_asked_for(
    capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    memory = as_json(capsys, target, "--max-num-seqs", 4, "--max-model-len", "1k")["memory"]
    assert memory["bfloat16"]["kv_bytes"] == 192 * 4 * 1024
    code, _, err = inspect(capsys, target, "--max-num-seqs", 0)
    assert code == 2
    assert "'--max-num-seqs': 0 is out of range; give 1 to" in err


@pytest.mark.parametrize("fmt", ["deepspec", "speculators"])
def test_a_draft_alone_is_recognised(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fmt: str
) -> None:
    write_draft(tmp_path, fmt, markov="rnn", sample_from_anchor=False, lm_head=True)
    report = as_json(capsys, tmp_path)
    found = report["draft"]
    assert (report["target"], report["pair"]) == (None, None)
    assert (found["format"], found["layout"], found["markov"]) == (fmt, "fill-in", "rnn")
    assert (found["num_speculative_tokens"], found["taps"]) == (4, [1, 3])
    assert (found["embed_tokens"], found["lm_head"]) == ("absent", "unknown")
    assert report["memory"]["float32"]["weight_bytes"]["target"] == 0


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_the_targets_tensors_are_found_and_counted_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tied: bool
) -> None:
    target = write_target(tmp_path / "t", tied=tied)
    tensors = read_tensors(target)
    head = tensors[EMBED] if tied else tensors["lm_head.weight"]
    write_draft(tmp_path / "d", embed=tensors[EMBED], lm_head=head)
    write_draft(tmp_path / "own", embed=True, lm_head=True)
    write_draft(tmp_path / "bare")
    reports = {name: as_json(capsys, target, tmp_path / name) for name in ("d", "own", "bare")}
    states = {n: (r["draft"]["embed_tokens"], r["draft"]["lm_head"]) for n, r in reports.items()}
    assert states == {
        "d": ("equal", "equal"),
        "own": ("own", "own"),
        "bare": ("absent", "absent"),
    }
    held = {n: r["memory"]["float32"]["weight_bytes"]["draft"] for n, r in reports.items()}
    assert held["d"] == held["bare"] == held["own"] - 2 * 128 * 32 * 4
    assert {report["pair"]["fits"] for report in reports.values()} == {True}


def test_a_pair_that_does_not_fit_is_told_and_exits_2(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    write_draft(tmp_path, num_target_layers=5)
    report = as_json(capsys, target, tmp_path, code=2)
    assert report["pair"]["fits"] is False
    assert "number of target layers 5, the target has 3" in report["pair"]["problem"]
    code, out, _ = inspect(capsys, target, tmp_path)
    assert code == 2
    assert "does not fit" in out
    assert "hint: use the drafter" in out


def test_the_text_names_everything(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    write_draft(tmp_path, "speculators", windows=(16, 0), draft_vocab_size=64, markov="gated")
    code, out, err = inspect(capsys, target, tmp_path)
    assert (code, err) == (0, "")
    for words in (
        "Qwen3ForCausalLM",
        "4 query, 2 KV, 8 wide",
        "G = 4, anchor-first",
        "h[1, 3] of an unstated number of target layers",
        "layer 0: last 16 context tokens, causal block; layer 1: full context, bidirectional",
        "128, mask token 2; drafts from 64 of them (d2t)",
        "gated, rank 8",
        "hidden + Markov embedding",
        "not in the file; the target's is used",
        "fits: ",
        "Memory, 32 requests of 512 tokens",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM', not supported"),
        ({"num_experts": 8}, "may change the computation: num_experts=8"),
    ],
)
def test_an_unsupported_checkpoint_is_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_target(tmp_path, tokenizer=False)
    edit_json(tmp_path / "config.json", change)
    code, out, err = inspect(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert "\nhint: " in err


def test_swapped_arguments_say_so(
    capsys: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    write_draft(tmp_path)
    code, _, err = inspect(capsys, tmp_path, target)
    assert code == 2
    assert "a drafter, not a target" in err
    code, _, err = inspect(capsys, target, target)
    assert code == 2
    assert "a target, not a drafter" in err


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_human_sizes(count: int, text: str) -> None:
    assert human(count) == text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_hidden_layers": 4}, "tensor model.layers.3.* is missing"),
        ({"num_hidden_layers": 2}, "tensors are not part of the network"),
        ({"intermediate_size": 48}, r"must have shape \[48, 32\]"),
    ],
)
def test_tensors_that_do_not_match_the_config_are_told_and_exit_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, int], problem: str
) -> None:
    """It once said `fits` of folders that loading refused."""
    folder = write_target(tmp_path / "t", "LlamaForCausalLM")
    edit_json(folder / "config.json", change)
    report = as_json(capsys, folder, code=2)
    assert report["tensors"]["fits"] is False
    assert re.search(problem, report["tensors"]["problem"]), report["tensors"]["problem"]


def test_a_draft_with_a_tensor_missing_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    draft = write_draft(tmp_path / "d")
    tensors = read_tensors(draft)
    del tensors["markov_head.markov_w1.weight"]
    write_tensors(draft, tensors)
    report = as_json(capsys, target, draft, code=2)
    assert "markov_w1.weight is missing" in report["pair"]["problem"]


def test_deepseek_v4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers by kind, the drafter in the same file, rings by request, GPUs."""
    folder = write_deepseek_v4(tmp_path / "v4")
    code, out, _ = inspect(capsys, folder, folder, "--max-num-seqs", 3, "--max-model-len", 100)
    assert code == 0
    assert "4: 1 window (see 8 tokens), 2 sparse (also 3 entries of 4 tokens), 1 heavy" in out
    assert "8, 2 a token, 32 wide, and a shared one; looked up by token in 1 layers" in out
    assert "G = 4, anchor-first" in out
    assert "taps              h[2, 4] of 4 target layers" in out
    assert "Pair\n  fits" in out
    for layout in ("tensor", "data"):
        assert re.search(rf"GPUs, {layout} +1 of 141 GB, 0.0 GB \(0.0 weights, 0.0 requests\)", out)
    code, out, _ = inspect(
        capsys, folder, folder, "--max-num-seqs", 3, "--max-model-len", 100, "--json"
    )
    plan = json.loads(out)["memory"]["float32"]
    # an entry of 16 every 4 tokens in two layers, with an index key of 16 each; one every 8 tokens
    per_token = 4 * (2 * (16 + 16) / 4 + 16 / 8)
    assert plan["kv_bytes_per_token"] == {"target": per_token, "draft": 0.0}
    # windows of 8 + 5; rows of 2 x 4 + 5 with 2 x 2 x (16 + 16) values, of 8 + 5 with 2 x 16
    ring = 4 * 13 * 16 + 2 * 13 * 4 * 32 + 13 * 2 * 16
    assert plan["kv_bytes_per_request"] == {"target": 4 * ring, "draft": 4 * 2 * 13 * 16}
    assert plan["kv_bytes"] == 3 * (100 * per_token + 4 * ring + 4 * 2 * 13 * 16)


def test_a_drafter_of_another_family_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, target: Path
) -> None:
    """It ended in an AssertionError, or in a complaint about the target's own tensors."""
    v4, v41 = write_deepseek_v4(tmp_path / "v4"), write_deepseek_v41(tmp_path / "v41")
    dense = write_draft(tmp_path / "d")
    for model, draft in ((v4, dense), (v41, v4), (v4, v41), (target, v4)):
        report = as_json(capsys, model, draft, code=2)
        assert report["pair"]["fits"] is False
        assert report["memory"]["float32"]["weight_bytes"]["draft"] == 0


def test_deepseek_v41(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Entries are counted where they are made: in two layers of the six that see any."""
    folder = write_deepseek_v41(tmp_path / "v41")
    bounds = Bounds.of(folder, None)  # what a dry run goes by is nested, too
    assert bounds.max_model_len == bounds.trained == 512
    assert Bounds.of(folder, 100).max_model_len == 100
    assert Bounds.of(tmp_path, 100) == Bounds(100, None, None)
    code, out, _ = inspect(capsys, folder, folder, "--max-num-seqs", 3, "--max-model-len", 100)
    assert code == 0
    assert (
        "7: 1 window (see 8 tokens), 2 shared (also 3 entries of 2 tokens, kept by layer 1), "
        "4 shared (also 3 entries of 1 token, kept by layer 3), chosen in layers 1, 3, 5, "
        "those after 3 inside 3 blocks of 2"
    ) in out
    assert "taps              h[1, 3] of 7 target layers" in out
    assert "n-grams     of 2 to 3 tokens, 32 numbers a row: 60 rows in layer 1, 120 in 4" in out
    assert "Pair\n  fits" in out
    code, out, _ = inspect(capsys, folder, folder, "--max-model-len", 100, "--json")
    assert code == 0
    plan = json.loads(out)["memory"]["float32"]
    # an entry and an index key of 16 each: of every two tokens, and of every one
    assert plan["kv_bytes_per_token"] == {"target": 4 * (32 / 2 + 32), "draft": 0.0}
    # windows of 8 + 5 in seven layers; 2 + 5 tokens that wait, with a value and a score of 16; and
    # the numbers of 2 + 5, for pairs and triples
    assert plan["kv_bytes_per_request"]["target"] == 4 * (7 * 13 * 16 + 7 * 2 * 16) + 8 * 7


def test_gpus_by_what_they_share_of_attention(tmp_path: Path) -> None:
    """Rows of large products, dealt or whole, and what is kept of requests, of all or a share."""
    folder = write_deepseek_v4(tmp_path / "v4")
    target, draft = parse_target(folder), parse_draft(folder)
    assert isinstance(target, V4TargetSpec)
    assert isinstance(draft, V4DraftSpec)
    dealt = dealt_numbers(target.layers) + dealt_numbers(draft.layers)
    sinks = 4 * (4 + 2)  # heads of layers and stages
    found = [
        sum(weight_bytes(folder, target, draft, torch.float32, 4, data_attention=data).values())
        for data in (False, True)
    ]
    assert found[1] - found[0] == (dealt + sinks) * 4 * 3 // 4
    many = gpus_needed(folder, target, draft, torch.float32, 7, 100e9, 0)["attention_parallel"]
    assert many["tensor"]["gpus"] is None
    assert many["tensor"]["kv_bytes_each"] == 700e9
    assert many["data"]["gpus"] is None
    assert many["data"]["kv_bytes_each"] == 200e9, "two of seven on one of four"
    few = gpus_needed(folder, target, draft, torch.float32, 7, 50e9, 0)["attention_parallel"]
    assert few["tensor"]["gpus"] is None
    assert few["data"]["gpus"] == 4


def test_deepseek_v4_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed weights are counted as they are held; two of fp4 are in a byte, scales are none."""
    plain = write_deepseek_v4(tmp_path / "p", names="released", heavy=128)
    packed = write_deepseek_v4(tmp_path / "q", names="released", heavy=128, packed="fp4")
    found = {}
    for folder in (plain, packed):
        code, out, _ = inspect(capsys, folder, "--json", "--max-model-len", 64)
        assert code == 0
        found[folder] = json.loads(out)
    assert found[plain]["target"]["parameters"] == found[packed]["target"]["parameters"]
    size = [found[f]["memory"]["bfloat16"]["weight_bytes"]["target"] for f in (plain, packed)]
    # 4 layers of 8 experts of 3 matrices of 32 x 32: 2 bytes each number, or 1/2 and a scale of 32
    saved = 4 * 8 * 3 * 32 * 32 * (2 - 0.5 - 1 / 32)
    assert size[0] - size[1] > saved
