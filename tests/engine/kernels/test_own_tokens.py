"""Tokens at the ranks that hold their requests, against lists."""

import random

import pytest
import torch

from engine.kernels.own_tokens import own_tokens

SPARE = 11


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
