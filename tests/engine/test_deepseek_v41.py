"""DeepSeek-V4.1: logits and drafts against a definition that keeps nothing, and rejected drafts."""

import random
from pathlib import Path

import pytest
import torch

from engine.kernels.packed import Packed
from tests.helpers.deepseek_v4 import GAMMA
from tests.helpers.deepseek_v41 import PlainV41, write_deepseek_v41
from tests.helpers.engines import make_engine, outputs, prompts, record_drafts, requests, teach
from tests.helpers.fed import Fed, feed_with_rejections, load

TOLERANCE = {"atol": 1e-5, "rtol": 0.0}
IDS = [(7 * i * i + 3 * i) % 120 + 4 for i in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek_v41(tmp_path_factory.mktemp("v41") / "v41")


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainV41:
    return PlainV41(folder)


def test_logits_are_those_of_the_definition(folder: Path, plain: PlainV41) -> None:
    """Whole, then in chunks: of one token, of odd and even ones, longer than every ring."""
    network = load(folder)
    assert set(network.engrams) == {1, 4}
    want = plain.states(IDS)[1].float()
    (got,) = Fed(network, 1, 120, GAMMA + 1).feed([(0, 0, IDS)])
    torch.testing.assert_close(got, want, **TOLERANCE)
    fed, at = Fed(network, 1, 120, GAMMA + 1), 0
    for count in (1, 2, 3, 5, 7, 11, 17, 23, 51):
        (got,) = fed.feed([(0, at, IDS[at : at + count])])
        torch.testing.assert_close(got, want[at : at + count], **TOLERANCE)
        at += count
    assert at == 120


def test_networks_need_no_tables(tmp_path: Path, plain: PlainV41) -> None:
    folder = write_deepseek_v41(tmp_path / "v41", engram=False)
    network, ids = load(folder), IDS[:40]
    fed = Fed(network, 1, 40, GAMMA + 1)
    assert fed.state.tokens is None
    (got,) = fed.feed([(0, 0, ids)])
    torch.testing.assert_close(got, PlainV41(folder).states(ids)[1].float(), **TOLERANCE)
    assert (got - plain.states(ids)[1]).abs().max() > 0.1, "tables change what comes out"


@pytest.mark.parametrize(
    ("ratios", "makes", "chooses", "finds"),
    [([2, 0, 2, 2], [0, 2], [0, 2, 3], 2), ([0, 1, 1, 2, 0], [1, 3], [1, 2, 3], -1)],
)
def test_layers_in_other_orders(
    tmp_path: Path, ratios: list[int], makes: list[int], chooses: list[int], finds: int
) -> None:
    """Blocks of pairs; a source of pairs after one of single tokens; windows between and last."""
    folder = write_deepseek_v41(
        tmp_path / "v41",
        engram=False,
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=makes,
        index_source_layer_ids=chooses,
        candidate_source_layer_id=finds,
    )
    want = PlainV41(folder).states(IDS[:60])[1].float()
    fed = Fed(load(folder), 1, 60, GAMMA + 1)
    for first, stop in ((0, 31), (31, 32), (32, 60)):
        (got,) = fed.feed([(0, first, IDS[first:stop])])
        torch.testing.assert_close(got, want[first:stop], **TOLERANCE)


def test_layers_keep_what_they_make_and_no_more(folder: Path) -> None:
    """Two sources; one needs tokens until their pair is full, the other none at all."""
    states = Fed(load(folder), 1, 120, GAMMA + 1).state.layers
    assert [state.compressed is not None for state in states] == [i in (1, 3) for i in range(7)]
    assert [state.index is not None for state in states] == [i in (1, 3) for i in range(7)]
    kept = [s.rows.numel() for i in (1, 3) for s in (states[i].compressed, states[i].index) if s]
    assert kept == [2 * (2 + GAMMA + 1) * 2 * 16, 0, 0, 0]


def test_choices_are_made_inside_candidates(tmp_path: Path, folder: Path, plain: PlainV41) -> None:
    """Where all blocks are kept it is as if there were none; three of them change what is seen."""
    sizes = {"candidate_topk_blocks": 60}
    found = []
    for name, text in (("all", sizes), ("none", {"candidate_source_layer_id": -1})):
        network = load(write_deepseek_v41(tmp_path / name, **text))
        found += Fed(network, 1, 120, GAMMA + 1).feed([(0, 0, IDS)])
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
    few = plain.states(IDS)[1].float()
    assert (found[0] - few).abs().max() > 0.1
    torch.testing.assert_close(found[0][:6], few[:6], **TOLERANCE)  # three blocks are all


def test_rejected_drafts_undo_nothing(folder: Path, plain: PlainV41) -> None:
    """Two sequences in ragged batches; wrong tokens are fed behind right ones, any number of them.

    Rounds begin at every residue of the position modulo the window and, so, the ratios.
    """
    network, rng, length = load(folder), random.Random(4), 110
    truth = [[rng.randrange(4, 128) for _ in range(length + GAMMA + 1)] for _ in range(2)]
    want = [plain.states(ids)[1].float() for ids in truth]
    fed = Fed(network, 2, length + GAMMA + 1, GAMMA + 1)
    assert feed_with_rejections(fed, rng, truth, want, GAMMA, TOLERANCE) == set(range(8))


def test_its_drafter_in_the_round(folder: Path, plain: PlainV41) -> None:
    """Greedy outputs are the definition's, drafted or not; every draft is its, and every logit."""
    many = requests(prompts(3, seed=4, longest=30), max_tokens=16)
    greedy = outputs(make_engine(folder), many)
    for request in many[:2]:
        ids = list(request.prompt_token_ids)
        assert plain.greedy(ids, 16) == list(greedy[request.request_id])
    engine = make_engine(folder, folder, max_num_seqs=2, max_num_batched_tokens=13)
    seen = record_drafts(engine)
    teach(engine, greedy, 0.7)
    assert outputs(engine, many) == greedy
    assert engine.stats.acceptance_length > 1.8
    assert len(seen) >= 8
    for tokens, drafts, confidence in seen[::3]:
        ids, logits = plain.draft(tokens)
        assert drafts == ids
        torch.testing.assert_close(confidence, torch.tensor(logits), atol=2e-4, rtol=2e-4)


def test_packed_weights_are_their_numbers(tmp_path: Path) -> None:
    """fp8 by blocks of 32 x 32, which no matrix here is a multiple of, and fp4 experts."""
    folder = write_deepseek_v41(tmp_path / "v41", packed=True)
    network = load(folder)
    want = PlainV41(folder / "plain").states(IDS[:50])[1].float()
    (got,) = Fed(network, 1, 50, GAMMA + 1).feed([(0, 0, IDS[:50])])
    torch.testing.assert_close(got, want, **TOLERANCE)
    attention, experts = network.layers[1].attention, network.layers[1].experts
    assert attention.q.packed.block == 32  # type: ignore[union-attr]
    assert isinstance(experts.gate_up.weight, Packed)
    assert experts.gate_up.weight.kind == "fp4"
    many = requests(prompts(2, seed=9, longest=20), max_tokens=6)
    assert outputs(make_engine(folder, folder), many) == outputs(make_engine(folder), many)
