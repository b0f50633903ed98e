"""Rounds at the ranks that hold their requests: what each has room for, and what it attends to."""

import random

import torch

from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.rolling import token_places
from engine.kernels.verify_plan import verify_lens
from engine.runner.batch import Members, Seats, dealt, own_room

GAMMA, ROWS = 4, 12


def drawn(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R], padding among them, and survivals [R, G] with ties."""
    rows = rng.sample(range(ROWS), rng.randint(1, 8)) + [ROWS] * rng.randrange(3)
    chances = torch.tensor([[rng.choice([0.3, 0.5, 0.9, 1.0]) for _ in range(GAMMA)] for _ in rows])
    return torch.tensor(rows), chances.cumprod(dim=1)


def most_of(rows: torch.Tensor, size: int) -> int:
    held = [row for row in rows.tolist() if row != ROWS]
    return max(sum(row % size == rank for row in held) for rank in range(size))


def test_each_rank_verifies_its_best_drafts_within_its_room() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        rows, survival = drawn(rng)
        size, num = rng.choice([2, 3]), len(rows)
        budget = rng.randint(0, num * GAMMA)
        tokens, most = num + budget, most_of(rows, size)
        starts, live = torch.arange(num) + 7, rows != ROWS
        room = own_room(num, tokens, GAMMA + 1, most)
        assert most <= room <= min(tokens, most * (GAMMA + 1))
        planned = verify_lens(survival, starts, live, torch.tensor([budget]))
        got = Seats(0, size, ROWS).within(planned, survival, starts, rows, room)
        order = sorted(
            ((-float(survival[r, k]), k, r) for r in range(num) for k in range(GAMMA) if live[r]),
        )[:budget]
        want = [int(alive) for alive in live]
        left = [room - sum(rows[live] % size == rank).item() for rank in range(size)]
        for _, _, r in order:
            owner = int(rows[r]) % size
            if left[owner] > 0:
                want[r] += 1
                left[owner] -= 1
        assert got.lens.tolist() == want, seed
        assert got.seq_lens.tolist() == [
            s + n if n else 0 for s, n in zip(starts.tolist(), want, strict=True)
        ]


def test_what_comes_later_does_not_decide_whether_a_draft_is_verified() -> None:
    """Confidences of a draft and of those after it may know what was drafted."""
    for seed in range(40):
        rng = random.Random(seed)
        rows, survival = drawn(rng)
        num, most = len(rows), most_of(rows, 2)
        seats, starts, live = Seats(1, 2, ROWS), torch.zeros(num).long(), rows != ROWS
        budget = rng.randint(0, num * GAMMA)
        room = own_room(num, num + budget, GAMMA + 1, most)

        def lens(x: torch.Tensor) -> list[int]:
            planned = verify_lens(x, starts, live, torch.tensor([budget]))  # noqa: B023
            return seats.within(planned, x, starts, rows, room).lens.tolist()  # noqa: B023

        before = lens(survival)
        request, k = rng.randrange(num), rng.randrange(GAMMA)
        other = survival.clone()
        other[request, k + 1 :] = survival[request, k] * rng.choice([0.0, 0.4, 1.0])
        after = lens(other)
        assert (before[request] > k + 1) == (after[request] > k + 1)


def test_even_ranks_have_little_room_to_spare() -> None:
    assert own_room(256, 256, 6, 128) == 128, "a plain step"
    assert own_room(256, 256 * 6, 6, 128) == 128 * 6, "every draft"
    assert own_room(256, 256 + 640, 6, 128) == 128 + 400, "320 drafts each, and a quarter more"
    assert own_room(4, 24, 6, 4) == 24, "all of them one rank's"


def test_a_rank_attends_for_its_own_requests() -> None:
    """Rows and tokens are its own; padding, and room left over, are nobody's."""
    rows, lens, starts = [4, 7, 2, 9, ROWS], [2, 3, 1, 2, 0], [5, 0, 8, 3, 0]
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    stops = [s + n for s, n in zip(starts, lens, strict=True)]
    batch = AttentionBatch(
        block_table=torch.arange(5)[:, None].int(),
        cu_seqlens_q=cu,
        seq_lens=torch.tensor(stops).int(),
        kv_block_size=16,
        query_lens=tuple(lens[:4]),
        kv_lens=tuple(stops[:4]),
        kv_index=tuple(slice(i, i + n) for i, n in enumerate(stops[:4])),
        rows=torch.tensor(rows),
    )
    members = Members(torch.tensor(rows), (), most_owned=3)
    for rank, mine in enumerate([[0, 2], [1, 3]]):
        own = dealt(batch, members, Seats(rank, 2, ROWS), 10, 6).own
        assert own is not None
        here, held = own.batch, [lens[i] for i in mine]
        assert here.rows is not None
        assert here.rows.tolist() == [rows[i] // 2 for i in mine] + [ROWS // 2]
        assert here.block_table[:2, 0].tolist() == mine
        assert here.seq_lens.tolist() == [stops[i] for i in mine] + [0]
        assert here.query_lens == tuple(held)
        assert here.kv_index == tuple(batch.kv_index[i] for i in mine)
        at = token_places(here, 6)
        padding = [-1] * (6 - sum(held))
        many = [rows[i] // 2 for i in mine for _ in range(lens[i])]
        assert at.row.tolist() == many + padding
        tokens = [int(cu[i]) + k for i in mine for k in range(lens[i])]
        assert own.cut(torch.arange(10)).tolist() == tokens + [0] * len(padding)
        firsts = [starts[i] for i in mine for _ in range(lens[i])]
        assert at.start.tolist()[: len(firsts)] == firsts
