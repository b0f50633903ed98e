"""DeepSeek-V4: logits against transformers, drafts against a dense definition, greedy equality."""

import copy
import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig
from engine.checkpoints import plan_checkpoints
from engine.errors import CheckpointError
from engine.kernels.packed import Packed
from engine.kv.rolling import RollingState
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_drafter import V4Drafter
from engine.models.deepseek_v4_layers import layer_shapes
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.draft_config import parse_draft
from engine.models.draft_tail import TailOrder
from engine.models.layers import Placement
from engine.models.loader import Checkpoint
from engine.models.target_config import parse_target
from engine.sizing import bytes_of_block, bytes_of_rows
from tests.helpers.checkpoints import read_tensors, write_tensors
from tests.helpers.deepseek_v4 import (
    DELAYED,
    GAMMA,
    HEAVY,
    MARKOV_NAMES,
    SPARSE,
    STAGES,
    TAPS,
    PlainDelayed,
    PlainV4Draft,
    write_deepseek_v4,
)
from tests.helpers.deepseek_v41 import write_deepseek_v41
from tests.helpers.drafts import MASK
from tests.helpers.engines import make_engine, outputs, prompts, record_drafts, requests, teach
from tests.helpers.fed import AT, Fed, feed_with_rejections, load
from tests.helpers.reference import PlainTarget
from tests.helpers.threads import ThreadRanks, on_threads

TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek_v4(tmp_path_factory.mktemp("v4") / "v4")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PlainTarget:
    return PlainTarget(folder)


VARIANTS: dict[str, dict[str, Any]] = {
    "as transformers saves it": {},
    "as transformers holds it": {"names": "memory"},
    "as released": {"names": "released", "heavy": 128},
    "windows alone": {"kinds": ("sliding_attention",) * 4},
    "heavy layers first": {"kinds": (HEAVY, HEAVY, SPARSE, HEAVY)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Whole, then in ragged chunks of a sequence each: 150 tokens close a window of 128, too."""
    folder = write_deepseek_v4(tmp_path / "v4", **VARIANTS[name])
    network = load(folder)
    ids = [(7 * i * i + 3 * i) % 120 + 4 for i in range(150)]
    want = PlainTarget(folder).states(ids)[1]
    (got,) = Fed(network, 1, 150, GAMMA + 1).feed([(0, 0, ids)])
    torch.testing.assert_close(got, want, **TOLERANCE)
    fed, at = Fed(network, 1, 150, GAMMA + 1), 0
    for count in (1, 2, 3, 5, 7, 11, 17, 23, 31, 50):
        (got,) = fed.feed([(0, at, ids[at : at + count])])
        torch.testing.assert_close(got, want[at : at + count], **TOLERANCE)
        at += count
    assert at == 150


def test_experts_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """A token's row of the table of experts: on a GPU such an index would end the run."""
    folder = write_deepseek_v4(tmp_path / "v4")
    tensors = read_tensors(folder)
    (name,) = (n for n in tensors if n.endswith("tid2eid"))
    tensors[name][5, 1] = 77
    write_tensors(folder, tensors)
    with pytest.raises(CheckpointError, match=r"tid2eid: 77 is outside \[0, 8\)"):
        make_engine(folder)


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_packed_weights_are_their_numbers(tmp_path: Path, kind: str) -> None:
    """fp8 attention and shared experts; fp4 experts, or fp8 ones with float32 scales."""
    folder = write_deepseek_v4(tmp_path / "v4", names="released", heavy=128, packed=kind)
    ids = [(11 * i * i + 5 * i) % 120 + 4 for i in range(60)]
    want = PlainTarget(folder / "plain").states(ids)[1]
    network = load(folder)
    (got,) = Fed(network, 1, 60, GAMMA + 1).feed([(0, 0, ids)])
    torch.testing.assert_close(got, want, **TOLERANCE)
    matrices = network.layers[1].experts.gate_up.weight
    assert isinstance(matrices, Packed)
    assert matrices.kind == kind
    if kind == "fp4":  # and its drafter's, in the same round
        many = requests(prompts(2, seed=9, longest=20), max_tokens=6)
        assert outputs(make_engine(folder, folder), many) == outputs(make_engine(folder), many)


def test_delayed_streams_and_their_drafter(tmp_path: Path) -> None:
    """As in V4.1: against a dense definition of target and drafter, and its drafts in the round."""
    windows = ("sliding_attention",) * 4
    folder = write_deepseek_v4(tmp_path / "v4", kinds=windows, delayed=True)
    plain, ids = PlainDelayed(folder), [(11 * i * i + 5 * i) % 120 + 4 for i in range(40)]
    want = plain.states(ids)[1].float()
    fed, at = Fed(load(folder), 1, 40, GAMMA + 1), 0
    for count in (17, 1, 5, 2, 15):
        (got,) = fed.feed([(0, at, ids[at : at + count])])
        torch.testing.assert_close(got, want[at : at + count], **TOLERANCE)
        at += count
    many = requests(prompts(2, seed=6, longest=20), max_tokens=9)
    greedy = outputs(make_engine(folder), many)
    engine = make_engine(folder, folder)
    seen = record_drafts(engine)
    teach(engine, greedy, 0.6)
    assert outputs(engine, many) == greedy
    for tokens, drafts, confidence in seen[::2]:
        ids, logits = plain.draft(tokens)
        assert drafts == ids
        torch.testing.assert_close(confidence, torch.tensor(logits), atol=2e-4, rtol=2e-4)


def test_rejected_drafts_undo_nothing(folder: Path, reference: PlainTarget) -> None:
    """Two sequences in ragged batches; wrong tokens are fed behind right ones, any number of them.

    Rounds begin at every residue of the position modulo the window and the ratios.
    """
    network, rng, length = load(folder), random.Random(2), 140
    truth = [[rng.randrange(4, 128) for _ in range(length + GAMMA + 1)] for _ in range(2)]
    want = [reference.states(ids)[1] for ids in truth]
    fed = Fed(network, 2, length + GAMMA + 1, GAMMA + 1)
    assert feed_with_rejections(fed, rng, truth, want, GAMMA, TOLERANCE) == set(range(8))


def test_drafts_are_what_the_checkpoint_means(folder: Path, reference: PlainTarget) -> None:
    """Every draft and confidence of every round, from a definition that keeps nothing."""
    many = requests(prompts(4, seed=4, longest=30), max_tokens=20)
    plain = outputs(make_engine(folder), many)
    for request in many[:2]:
        ids = list(request.prompt_token_ids)
        assert reference.greedy(ids, 20) == list(plain[request.request_id])
    engine = make_engine(folder, folder, max_num_seqs=3, max_num_batched_tokens=13)
    seen = record_drafts(engine)
    teach(engine, plain, 0.7)
    assert outputs(engine, many) == plain
    assert engine.stats.acceptance_length > 1.8
    dense = PlainV4Draft(folder, reference)
    assert len(seen) >= 12
    for tokens, ids, confidence in seen[::3]:
        drafts, logits = dense.draft(tokens)
        assert ids == drafts
        torch.testing.assert_close(confidence, torch.tensor(logits), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("version", ["V4", "V4.1"])
def test_preempted_requests_begin_again(folder: Path, tmp_path: Path, version: str) -> None:
    """Rings are their rows': what another request, or a round too many, left is never read."""
    folder = folder if version == "V4" else write_deepseek_v41(tmp_path / "v41")
    many = requests(prompts(6, seed=7), max_tokens=20)
    want = outputs(make_engine(folder), many)
    limits = {"max_num_seqs": 5, "max_model_len": 80, "kv_cache_memory_bytes": _memory(folder)}
    small = make_engine(folder, folder, overlap="on", **limits)
    teach(small, want, 0.5)
    assert outputs(small, many) == want
    assert small.stats.preemptions > 0
    assert small.stats.cached_tokens == 0


def _memory(folder: Path) -> int:
    """Memory for the rings of 5 requests, and blocks for two or three of them."""
    config = EngineConfig(model=str(folder), draft=str(folder), device="cpu", kv_block_size=8)
    plan, _ = plan_checkpoints(config)
    blocks = 20 * bytes_of_block(config, plan, AT)
    return bytes_of_rows(plan, 5, AT) + blocks


FIXTURES = Path(os.environ.get("DSPARK_FIXTURES", Path(__file__).parents[3] / "shared/fixtures"))
GOLDEN = FIXTURES / "deepseek_v4"
needs_fixtures = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no {GOLDEN}; set DSPARK_FIXTURES to where the files are"
)


@needs_fixtures
def test_golden_logits() -> None:
    """Two sequences of a checkpoint that transformers 5.23 saved, in one batch and in chunks."""
    golden = torch.load(GOLDEN / "tiny_checkpoint" / "golden.pt")
    network, ids = load(GOLDEN / "tiny_checkpoint"), golden["input_ids"].tolist()
    for sizes in ((137,), (1, 2, 6, 11, 30, 20, 7, 60)):
        fed, at = Fed(network, 2, 137, 6), 0
        for n in sizes:
            got = fed.feed([(i, at, ids[i][at : at + n]) for i in range(2)])
            for i in range(2):
                torch.testing.assert_close(got[i], golden["logits"][i, at : at + n], **TOLERANCE)
            at += n
        assert at == 137


@needs_fixtures
@pytest.mark.parametrize("delayed", [False, True])
def test_the_drafter_of_the_reference(tmp_path: Path, delayed: bool) -> None:
    """Another hand's definition of the drafter, V4's and V4.1's, on these weights and taps."""
    sys.path.insert(0, str(GOLDEN))
    try:
        ref_v4 = importlib.import_module("ref_v4")
    finally:
        sys.path.remove(str(GOLDEN))
    windows = {"kinds": ("sliding_attention",) * 4} if delayed else {}
    folder = write_deepseek_v4(tmp_path / "v4", delayed=delayed, **windows)
    weights = {n.removeprefix("mtp."): t for n, t in read_tensors(folder).items() if "mtp." in n}
    last, count = f"{STAGES - 1}.", DELAYED["dspark_n_routed_experts"] if delayed else 8
    stages = [reference_stage(weights, f"{k}.", count) for k in range(STAGES)]
    first, second = (weights[f"{last}markov_head.{n}.weight"] for n in MARKOV_NAMES[delayed])
    head: dict[str, Any] = {
        "main_proj": weights["0.main_proj.weight"],
        "main_norm": weights["0.main_norm.weight"],
        "norm": weights[f"{last}norm.weight"],
        "w1": first,
        "w2": second,
        "conf": weights[f"{last}confidence_head.proj.weight"],
    }
    if not delayed:
        head["hc_head"] = {n: weights[f"{last}hc_head_{n}"] for n in ("fn", "base", "scale")}
    target: Any = PlainDelayed(folder) if delayed else PlainTarget(folder)
    config = copy.copy(target.config if delayed else target.model.config)
    config.num_experts_per_tok = target.per_token if delayed else config.num_experts_per_tok
    names = read_tensors(folder)
    top = {"embed": names["model.embed_tokens.weight"], "head": names["head.weight"]}
    engine = make_engine(folder, folder)
    seen = record_drafts(engine)
    outputs(engine, requests(prompts(2, seed=8, longest=30), max_tokens=6))
    for tokens, ids, confidence in seen[::2]:
        draft = ref_v4.DSparkRef(config, stages, head, top, 200, GAMMA, MASK, delayed)
        states, _ = target.states(tokens[:-1])
        taps = torch.cat([states[k + (not delayed)].mean(dim=1) for k in TAPS], dim=1).float()
        with torch.no_grad():
            draft.write_context(taps, 0)
            drafts, chances = draft.draft(tokens[-1], len(tokens) - 1)
        assert ids == drafts
        assert confidence is not None
        torch.testing.assert_close(confidence.sigmoid(), torch.tensor(chances), atol=1e-4, rtol=0.0)


def reference_stage(w: dict[str, torch.Tensor], k: str, count: int) -> dict[str, Any]:
    """A stage as `ref_v4` names it."""
    names = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")
    experts = [f"{k}ffn.experts.{e}." for e in range(count)]
    gate_up = [torch.cat((w[e + "w1.weight"], w[e + "w3.weight"])) for e in experts]
    return {
        **{n: w[f"{k}attn.{n}.weight"] for n in names},
        "sink": w[f"{k}attn.attn_sink"],
        **{f"{n}_norm": w[f"{k}{n}_norm.weight"] for n in ("attn", "ffn")},
        **{
            f"hc_{n}": {x: w[f"{k}hc_{n}_{x}"] for x in ("fn", "base", "scale")}
            for n in ("attn", "ffn")
        },
        "moe": {
            "gate": w[f"{k}ffn.gate.weight"],
            "bias": w[f"{k}ffn.gate.bias"],
            "gate_up": torch.stack(gate_up),
            "down": torch.stack([w[e + "w2.weight"] for e in experts]),
            "sg": w[f"{k}ffn.shared_experts.w1.weight"],
            "su": w[f"{k}ffn.shared_experts.w3.weight"],
            "sd": w[f"{k}ffn.shared_experts.w2.weight"],
        },
    }


def fed_by_ranks(folder: Path, ranks: ThreadRanks, least: int, order: TailOrder) -> Any:
    """Hidden states, taps and draft states of some steps, streams sharded from `least` tokens."""
    at = Placement(torch.float32, AT.device, ranks)
    spec, drafting = parse_target(folder), parse_draft(folder)
    assert isinstance(spec, V4TargetSpec)
    assert isinstance(drafting, V4DraftSpec)
    with Checkpoint(folder) as weights, torch.inference_mode():
        made = V4Weights(weights, weights.has, at, folder=weights.folder)
        target = DeepseekV4(spec, made, 64)
        draft = V4Drafter(drafting, made, target, 64)
        target.shard_from = draft.shard_from = least
        target.tail_order = draft.tail_order = order
        fed = Fed(target, 1, 60, GAMMA + 1)
        state = RollingState.allocate(
            layer_shapes(drafting.layers), 2, 1, fed.block, GAMMA + 1, dtype=at.dtype,
            device=at.device,
        )  # fmt: skip
        found, first = [], 0
        for count in (13, 1, 3):
            batch, places = fed.batch([(0, first, [0] * count)])
            ids = places * 7 % 120 + 4
            hidden, taps = target.forward(ids, places, places, batch, fed.state, drafting.taps)
            assert taps is not None
            draft.store_context(taps, places, places, state, batch)
            first += count
            batch, places = fed.batch([(0, first, [0] * GAMMA)])
            found += [hidden, taps, draft.forward(places + 9, places, places, batch, state)]
    return found


@pytest.mark.parametrize("size", [2, 4] if "DSPARK_FULL" in os.environ else [2])
@pytest.mark.parametrize("version", ["V4", "V4.1"])
def test_streams_sharded_by_token_give_every_rank_the_same(
    folder: Path, tmp_path: Path, size: int, version: str
) -> None:
    """13, 1 and 3 tokens, blocks of 4: padding, and ranks with nothing else. Tails bit for bit."""
    folder = folder if version == "V4" else write_deepseek_v41(tmp_path / "v41")
    alone = on_threads(1, lambda ranks: fed_by_ranks(folder, ranks, 1, "collapse first"))[0]
    orders: tuple[TailOrder, TailOrder] = ("collapse first", "gather first")
    sharded = [
        on_threads(size, lambda ranks, o=order: fed_by_ranks(folder, ranks, 1, o))
        for order in orders
    ]
    whole = on_threads(size, lambda ranks: fed_by_ranks(folder, ranks, 1000, "collapse first"))
    for rank in range(size):
        for first, last, held, want in zip(
            sharded[0][rank], sharded[1][rank], whole[rank], alone, strict=True
        ):
            torch.testing.assert_close(first, last, atol=0, rtol=0)
            torch.testing.assert_close(first, want, **TOLERANCE)
            torch.testing.assert_close(held, want, **TOLERANCE)
    for got, same in zip(sharded[0][0], sharded[0][-1], strict=True):
        torch.testing.assert_close(got, same, atol=0, rtol=0)
