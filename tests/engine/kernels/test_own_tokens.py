"""Tokens at the ranks that hold their requests: reference against lists, kernel against it."""

import random
from pathlib import Path

import pytest
import torch

from engine.kernels.own_tokens import own_tokens, own_tokens_ref, own_tokens_triton
from tests.helpers.ahead import compiling
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

SPARE = 11
pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("seed", range(12))
def test_tokens_lie_with_their_rows(seed: int) -> None:
    rng = random.Random(seed)
    size, padding = rng.choice([1, 2, 3, 4]), rng.randrange(3)
    rows = rng.sample(range(SPARE), rng.randint(1, 7))
    lens = [rng.choice([0, 1, 3]) for _ in rows] + [0] * padding
    many = rows + [SPARE] * padding
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    total = int(cu[-1]) + rng.randrange(4)
    held = [[i for i, row in enumerate(rows) if row % size == rank] for rank in range(size)]
    most = max(map(len, held)) + rng.randrange(2)
    room = max(sum(lens[i] for i in mine) for mine in held) + rng.randrange(2)
    for rank in range(size):
        got = own_tokens(
            torch.tensor(many),
            cu,
            total,
            rank=rank,
            size=size,
            spare=SPARE,
            most_requests=most,
            most_tokens=room,
        )
        want = [[int(cu[i]) + k for i in mine for k in range(lens[i])] for mine in held]
        left_over = [[0] * (room - len(tokens)) for tokens in want]
        assert got.token.tolist() == [a + b for a, b in zip(want, left_over, strict=True)]
        assert got.request.tolist() == held[rank] + [-1] * (most - len(held[rank]))
        own = [lens[i] for i in held[rank]] + [0] * (most - len(held[rank]))
        assert got.cu_seqlens.tolist() == torch.tensor([0, *own]).cumsum(0).tolist()
        assert len(got.place) == total
        there = got.token.flatten()[got.place[: int(cu[-1])]] if room else got.place[:0]
        assert there.tolist() == list(range(int(cu[-1])))
        assert not got.place[int(cu[-1]) :].any()


@needs_triton
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "lens", [[8], [0], [3, 1, 8, 2, 5, 0, 0], [1, 200, 0, 70], [6] * 11 + [0] * 9]
)
def test_the_kernel(lens: list[int], size: int) -> None:
    rng = random.Random(len(lens))
    many = rng.sample(range(SPARE), min(len(lens), SPARE)) + [SPARE] * max(len(lens) - SPARE, 0)
    cu = torch.tensor([0, *lens]).cumsum(0).int().to(KERNEL_DEVICE)
    held = [[i for i, r in enumerate(many) if r != SPARE and r % size == o] for o in range(size)]
    for spared, rank in ((0, 0), (300, size - 1)):
        given = torch.tensor(many, device=KERNEL_DEVICE), cu, int(cu[-1]) + spared
        room = {
            "rank": rank,
            "size": size,
            "spare": SPARE,
            "most_requests": max(map(len, held)) + spared,
            "most_tokens": max(sum(lens[i] for i in mine) for mine in held) + spared,
        }
        if not room["most_tokens"]:
            continue
        for a, b in zip(
            own_tokens_triton(*given, **room), own_tokens_ref(*given, **room), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.skipif(INTERPRETED, reason="compiles; the interpreter does not")
def test_it_compiles(tmp_path: Path) -> None:
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    room = {"rank": 1, "size": 2, "spare": 256, "most_requests": 128, "most_tokens": 528}
    with compiling(tmp_path) as made:
        own_tokens_triton(torch.tensor([3, 8]), cu, 896, **room)
        assert len(made.kernels) == 1
