"""Which request and which row goes to which rank."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.ownership import Ownership

CPU = torch.device("cpu")


def ownership(num_reqs: int, rank: int, size: int) -> Ownership:
    return Ownership(num_reqs, rank, size, CPU)


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_request_has_one_owner_and_comes_back_in_place(num_reqs: int, size: int) -> None:
    deals = [ownership(num_reqs, rank, size) for rank in range(size)]
    assert all(torch.equal(d.order, deals[0].order) for d in deals), "a pure function of R and N"
    assert len(deals[0].order) == size * deals[0].capacity
    assert deals[0].capacity == -(-num_reqs // size)
    owned = torch.stack([d.mine for d in deals])
    assert torch.equal(owned.flatten(), deals[0].order)
    for rank, mine in enumerate(owned.tolist()):
        real = list(range(rank, num_reqs, size))
        assert mine == real + [0] * (len(mine) - len(real)), "room left over: request 0"
    assert deals[0].in_batch_order(owned).tolist() == list(range(num_reqs))


@given(st.data())
def test_ragged_rows_go_to_their_requests_owner(data: st.DataObject) -> None:
    size, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    live = data.draw(st.lists(st.integers(1, most), min_size=1, max_size=12))
    lens = live + [0] * data.draw(st.integers(0, 3))
    # slots without a request have no rows: their tokens are drafts of the others
    tokens = max(sum(lens), len(lens)) + data.draw(st.integers(0, 6))
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    for rank in range(size):
        deal = ownership(len(lens), rank, size)
        rows = deal.rows(cu, tokens, most)
        room = deal.room(tokens, most)
        assert rows.token.shape == (size * room,)
        assert room <= tokens
        local = rows.token.view(size, room)[rank].tolist()
        bounds = list(pairwise(rows.cu_seqlens.tolist()))
        assert len(bounds) == deal.capacity
        for slot, (begin, end) in enumerate(bounds):
            request = rank + slot * size
            want = range(*cu[request : request + 2].tolist()) if request < len(lens) else ()
            assert local[begin:end] == list(want)
        assert set(local[bounds[-1][1] :]) <= {0}, "room left over reads row 0"


def test_room_follows_the_tokens_not_the_longest_request() -> None:
    deal = ownership(256, 0, 2)
    assert deal.room(256 * 8, 8) == 128 * 8
    assert deal.room(256, 1) == 128, "nothing but anchors"
    assert deal.room(256 + 256, 8) == 456, "57 of 113 live requests, with 8 rows each"
    assert ownership(1, 1, 4).room(8, 8) == 8, "fewer requests than ranks"


def test_a_lone_request_in_two_slots_may_have_every_row() -> None:
    """Room once was c + T - R: its last row lay behind the logits, and a run's last row failed."""
    deal = ownership(2, 0, 2)
    rows = deal.rows(torch.tensor([0, 4, 4], dtype=torch.int32), 4, 8)
    assert rows.token.view(2, -1)[0].tolist() == [0, 1, 2, 3]
    assert deal.room(4, 8) == 4
