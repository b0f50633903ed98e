"""Made-up DeepSeek-V4 weights: packed as released, sane in scale, the same network on any rank."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.deepseek_v4_floor import block_bytes, round_bytes
from engine.dist.collectives import Solo
from engine.kernels.packed import Packed
from engine.models import families
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_drafter import V4Drafter
from engine.models.deepseek_v4_shapes import V4_TARGETS, RandomV4, v4_draft
from engine.models.deepseek_v4_spec import V4TargetSpec
from engine.models.layers import Placement
from engine.models.shapes import draft_shape, target_shape

FLASH = V4_TARGETS["deepseek-v4-flash"]


class Seat(Solo):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Scales(RandomV4):
    """Counts what it gives."""

    nbytes = 0

    def take(self, *args: Any, **more: Any) -> torch.Tensor:
        x = super().take(*args, **more)
        self.nbytes += x.nbytes
        return x

    def take_raw(self, *args: Any, **more: Any) -> torch.Tensor:
        x = super().take_raw(*args, **more)
        self.nbytes += x.nbytes
        return x


def small() -> V4TargetSpec:
    layers = replace(
        FLASH.layers,
        kinds=("window", "sparse"),
        hashed=(False, False),
        hidden_size=256,
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        q_rank=128,
        o_groups=2,
        o_rank=128,
        window=16,
        indexer=replace(FLASH.layers.indexer, num_heads=4, head_dim=32, top_k=4),
        experts=replace(FLASH.layers.experts, num_experts=8, per_token=2, width=256),
    )
    return replace(FLASH, layers=layers, vocab_size=64, max_position=64)


def test_shapes_have_the_layers_that_are_known() -> None:
    kinds = FLASH.layers.kinds
    assert [kinds.count(k) for k in ("window", "sparse", "heavy")] == [2, 21, 20]
    assert kinds[:5] == ("window", "window", "sparse", "heavy", "sparse")
    assert kinds[-1] == "sparse"
    assert target_shape("shape:deepseek-v4-flash") is FLASH
    assert draft_shape("shape:deepseek-v4-flash").taps == (41, 42, 43)


def test_a_slice_takes_the_bytes_it_is_known_to() -> None:
    """Four layers of 3.53 GB, embedding and head of 1.06 each; the drafter is 10.9 GB."""
    at = Placement(torch.bfloat16, torch.device("meta"))
    weights, spec = Scales(0), V4_TARGETS["deepseek-v4-flash-4"]
    target = families.build_target(spec, weights, at, 1)
    assert weights.nbytes / 1e9 == pytest.approx(4 * 3.59 + 2 * 1.06, rel=0.01)
    before = weights.nbytes
    draft = families.build_draft(v4_draft(spec), weights, target, at, 1)
    assert (weights.nbytes - before) / 1e9 == pytest.approx(10.9, rel=0.01)
    assert isinstance(target, DeepseekV4)
    assert isinstance(draft, V4Drafter)
    # one row: 6 of 256 experts, 13.4 MB each; hundreds of rows: all of them
    layer = target.layers[3]
    one, most = block_bytes(layer, 1), block_bytes(layer, 1000)
    assert most - one == pytest.approx(250 / 256 * 256 * 13.4e6, rel=0.01)
    plain = round_bytes(target, draft, 64, 1, 5)
    assert plain == round_bytes(target, None, 64, 1, 5)
    assert round_bytes(target, draft, 64, 6, 5) - plain > 10e9, "and the drafter's"


def test_a_slice_of_v41_takes_the_bytes_it_is_known_to() -> None:
    """Four of 40 layers of 7.4 GB each, whose whole is 298 GB; the drafter, its experts its own, 8;
    an entry of two tokens and one of one, with index keys, are all that is kept of a token."""
    at, spec = Placement(torch.bfloat16, torch.device("meta")), V4_TARGETS["deepseek-v4.1-flash-4"]
    weights = Scales(0, spec.fp8_block)
    target = families.build_target(spec, weights, at, 1)
    outer = 2 * 129280 * 5120 * 2
    assert weights.nbytes / 1e9 == pytest.approx(4 * (298.3 - outer / 1e9) / 40 + outer / 1e9, 0.01)
    before = weights.nbytes
    families.build_draft(v4_draft(spec), weights, target, at, 1)
    assert (weights.nbytes - before) / 1e9 == pytest.approx(8.1, rel=0.03)
    assert isinstance(target, DeepseekV4)
    source, reader = (target.layers[i].attention.shared for i in (2, 3))
    assert source is not None
    assert reader is not None
    assert reader.compressor is None
    assert (source.source, reader.source) == (2, 2)
    floors = [block_bytes(layer, 1000) for layer in target.layers]
    more = 2 * 512 * 5120 * 4 + 128 * 512 * 2 + 32 * 128 * 1280 + 32 * 5120 * 2
    assert floors[1] - floors[0] == pytest.approx(more, rel=0.01)
    assert min(floors[1:3]) > floors[3] > floors[0], "makes and chooses, chooses, neither"
    assert families.bytes_a_block(spec, 64, at) == 64 * (640 / 2 + 640) * 2
    assert v4_draft(V4_TARGETS["deepseek-v4.1-flash"]).taps == (37, 38, 39)


def test_made_up_networks_keep_the_spread_of_what_goes_through() -> None:
    spec = small()
    at = Placement(torch.float32, torch.device("cpu"))
    network = families.build_target(spec, RandomV4(0), at, 64)
    assert isinstance(network, DeepseekV4)
    experts = network.layers[0].experts
    assert isinstance(experts.gate_up.weight, Packed)
    assert experts.gate_up.weight.kind == "fp4"
    x = torch.randn(7, 256)
    for matrix in (network.layers[0].attention.q, experts.gate_up.of(3), experts.shared_in):
        out = matrix(torch.randn(7, matrix.in_features))
        assert 0.4 < float(out.std()) < 2.5
    assert torch.isfinite(experts(x, torch.arange(7))).all()


def test_ranks_hold_parts_of_one_network() -> None:
    spec, device = small(), torch.device("cpu")
    whole = families.build_target(spec, RandomV4(0), Placement(torch.float32, device), 8)
    parts = [
        families.build_target(spec, RandomV4(0), Placement(torch.float32, device, Seat(rank, 2)), 8)
        for rank in (0, 1)
    ]
    x = torch.randn(3, 128)
    q, *dealt = (n.layers[1].attention.q(x) for n in (whole, *parts))  # type: ignore[attr-defined]
    torch.testing.assert_close(torch.cat(dealt, dim=1), q)
    for e in range(8):
        one = whole.layers[1].experts.down.of(e)(torch.ones(1, 256))  # type: ignore[attr-defined]
        part = parts[e // 4].layers[1].experts.down.of(e % 4)  # type: ignore[attr-defined]
        torch.testing.assert_close(part(torch.ones(1, 256)), one)
