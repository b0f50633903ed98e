"""Routed experts: kernels against a loop over experts, plain and packed, some on other ranks."""

import pytest
import torch

from engine.kernels.cut_silu import cut_silu_ref, cut_silu_triton
from engine.kernels.experts import (
    ExpertMatrices,
    run_experts,
    run_experts_ref,
    run_experts_triton,
)
from engine.kernels.experts_triton import plan_tiles, plan_tiles_ref, plan_tiles_triton
from engine.kernels.packed import Packed, pack, unpack
from engine.kernels.router import route, route_ref, route_triton
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

LOW = torch.float16 if INTERPRETED else torch.bfloat16
pytestmark = pytest.mark.usefixtures("poison")
COUNT, HIDDEN, WIDTH = 5, 64, 32


def matrices(kind: str, *shape: int) -> ExpertMatrices:
    plain = torch.randn(shape) * shape[-1] ** -0.5
    if kind == "plain":
        return ExpertMatrices(plain.to(KERNEL_DEVICE))
    packed = pack(plain, kind[:3], float_scale="float" in kind)  # type: ignore[arg-type]
    at = packed.weight.to(KERNEL_DEVICE), packed.scale.to(KERNEL_DEVICE)
    return ExpertMatrices(Packed(packed.kind, *at))


def chosen(num_tokens: int, per_token: int, among: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(num_tokens, among, device=KERNEL_DEVICE)
    weights = torch.rand(num_tokens, per_token, device=KERNEL_DEVICE)
    return scores.topk(per_token, dim=1).indices, weights


@needs_triton
@pytest.mark.parametrize(
    ("kind", "num_tokens", "first", "among"),
    [
        ("plain", 1, 0, 5),
        ("plain", 9, 2, 8),
        ("plain", 70, 0, 5),
        ("fp8", 9, 2, 8),
        ("fp8 float", 1, 0, 5),
        ("fp4", 9, 2, 8),
    ],
)
def test_kernels(num_tokens: int, first: int, among: int, kind: str) -> None:
    """One token; experts of which other ranks hold some; tiles of 64 rows."""
    gate_up, down = matrices(kind, COUNT, 2 * WIDTH, HIDDEN), matrices(kind, COUNT, HIDDEN, WIDTH)
    experts, weights = chosen(num_tokens, 3, among)
    if num_tokens == 70:
        experts[:, 0] = 3  # one expert with more rows than a tile; some with none
        experts[:, 1:] = torch.tensor([0, 1], device=KERNEL_DEVICE)
    how = {"first": first, "limit": 0.7}
    x = torch.randn(num_tokens, HIDDEN, device=KERNEL_DEVICE)
    want = run_experts_ref(x, experts, weights, gate_up, down, **how)
    got = run_experts_triton(x, experts, weights, gate_up, down, **how)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    low = x.to(LOW)
    if kind == "plain":
        gate_up, down = (ExpertMatrices(m.weight.to(LOW)) for m in (gate_up, down))  # type: ignore[union-attr]
        exact = [ExpertMatrices(m.weight.float()) for m in (gate_up, down)]  # type: ignore[union-attr]
    else:
        exact = [gate_up, down]
    exactly = run_experts_ref(low.float(), experts, weights, *exact, **how)
    rounded = run_experts_ref(low, experts, weights, gate_up, down, **how)
    assert_as_good_as(
        run_experts_triton(low, experts, weights, gate_up, down, **how), exactly, rounded
    )


@needs_triton
@pytest.mark.parametrize("kind", ["plain", "fp8", "fp4"])
def test_tokens_have_the_same_bits_in_any_batch(kind: str) -> None:
    """Tiles of 16, 32 and 64 rows add in the same order."""
    gate_up, down = matrices(kind, COUNT, 2 * WIDTH, 128), matrices(kind, COUNT, 128, WIDTH)
    if kind == "plain":
        gate_up, down = (ExpertMatrices(m.weight.to(LOW)) for m in (gate_up, down))  # type: ignore[union-attr]
    experts, weights = chosen(60, 3, COUNT)
    x = torch.randn(60, 128, device=KERNEL_DEVICE).to(LOW)
    rows = [plan_tiles(experts[:n], COUNT).block_m for n in (60, 40, 3)]
    assert rows == [64, 32, 16]
    how = {"first": 0, "limit": 0.7}
    whole = run_experts_triton(x, experts, weights, gate_up, down, **how)
    for n in (40, 3):
        part = run_experts_triton(x[:n], experts[:n], weights[:n], gate_up, down, **how)
        torch.testing.assert_close(part, whole[:n], atol=0, rtol=0)


def test_packed_experts_are_their_unpacked_ones() -> None:
    x, (experts, weights) = torch.randn(9, HIDDEN), chosen(9, 2, COUNT)
    experts, weights = experts.cpu(), weights.cpu()
    packed = [pack(torch.randn(COUNT, *s), "fp4") for s in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    how = {"first": 0, "limit": 10.0}
    got = run_experts(x, experts, weights, *map(ExpertMatrices, packed), **how)
    plain = [ExpertMatrices(unpack(p)) for p in packed]
    want = run_experts(x, experts, weights, *plain, **how)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def test_every_pair_is_in_one_tile() -> None:
    experts = torch.tensor([[4, 0], [2, 4], [-1, 4], [4, 7]]).repeat(30, 1)
    plan = plan_tiles(experts, 5)
    flat, seen = experts.flatten(), []
    for expert, start in zip(plan.expert.tolist(), plan.start.tolist(), strict=True):
        if expert == 5:
            continue
        stop = min(start + plan.block_m, int(plan.stops[expert]))
        pairs = plan.order[start:stop]
        assert (flat[pairs] == expert).all()
        assert start < stop
        seen += pairs.tolist()
    assert sorted(seen) == [i for i, e in enumerate(flat.tolist()) if 0 <= e < 5]
    held = (flat >= 0) & (flat < 5)
    assert torch.equal(plan.place >= 0, held)
    assert torch.equal(plan.order[plan.place[held]], torch.arange(len(flat))[held])


@needs_triton
@pytest.mark.parametrize(
    ("num_tokens", "count", "block_m"), [(1, 5, 16), (90, 5, 16), (700, 3, 64)]
)
def test_a_plan_is_its_definition(num_tokens: int, count: int, block_m: int) -> None:
    """Of pairs and tiles that are there; experts of others below and above; blocks of pairs."""
    flat = torch.randint(-1, count + 2, (2 * num_tokens,), device=KERNEL_DEVICE)
    want, got = plan_tiles_ref(flat, count, block_m), plan_tiles_triton(flat, count, block_m)
    held = int(want.stops[-1])
    assert torch.equal(got.stops, want.stops)
    assert torch.equal(got.place, want.place)
    assert torch.equal(got.order[:held], want.order[:held])
    assert torch.equal(got.expert, want.expert)
    there = want.expert < count
    assert torch.equal(got.start[there], want.start[there])


@needs_triton
@pytest.mark.parametrize("hashed", [False, True])
def test_a_route_is_its_definition(hashed: bool) -> None:
    """Equal scores: the first; logits so large and so small that exp is not to be trusted."""
    logits = 4 * torch.randn(9, 13, device=KERNEL_DEVICE)
    logits[0] = 0.0
    logits[1, :3] = torch.tensor([60.0, -40.0, -17.0], device=KERNEL_DEVICE)
    ids = torch.randint(20, (9,), device=KERNEL_DEVICE)
    table = torch.rand(20, 13, device=KERNEL_DEVICE).argsort(dim=1)[:, :3].contiguous()
    bias = torch.randn(13, device=KERNEL_DEVICE).round()
    how = {"per_token": 3, "scale": 1.5, "bias": None, "table": table}
    how |= {} if hashed else {"bias": bias, "table": None}
    want, got = route_ref(logits, ids, **how), route_triton(logits, ids, **how)  # type: ignore[arg-type]
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], atol=1e-6, rtol=1e-5)


@needs_triton
def test_activation() -> None:
    x = 3 * torch.randn(5, 2 * 77, device=KERNEL_DEVICE)
    torch.testing.assert_close(cut_silu_triton(x, 0.9), cut_silu_ref(x, 0.9))


def test_routing_by_score_and_by_table() -> None:
    """The bias chooses and does not weigh; weights are of the chosen, and scaled."""
    logits, ids = torch.randn(6, 4), torch.arange(6)
    bias = torch.tensor([0.0, 5.0, 0.0, -5.0])
    experts, weights = route(logits, ids, bias=bias, table=None, per_token=2, scale=1.5)
    scores = torch.log1p(logits.exp()).sqrt()
    assert (experts[:, 0] == 1).all()
    assert not (experts == 3).any()
    for t in range(6):
        mine = scores[t, experts[t]]
        torch.testing.assert_close(weights[t], 1.5 * mine / mine.sum())
    table = torch.tensor([[3, 0]] * 3 + [[2, 1]] * 3)
    experts, weights = route(logits, ids, bias=None, table=table, per_token=2, scale=1.0)
    assert torch.equal(experts, table)
    torch.testing.assert_close(weights.sum(1), torch.ones(6))
