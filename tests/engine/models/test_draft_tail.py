"""Streams sharded by token become head states: either order, the same bits, fewer bytes."""

import pytest
import torch

from engine.dist.token_shards import TokenShards
from engine.kernels.hc_collapse import hc_collapse
from engine.models.draft_tail import TailOrder, head_states, received_bytes
from tests.helpers.threads import ThreadRanks, on_threads

WIDTH, BF16 = 96, torch.bfloat16


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 32])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_both_orders_give_every_rank_the_same_bits(size: int, num_tokens: int) -> None:
    """Ranks that hold nothing but padding take part in every exchange."""
    x, pre = torch.randn(num_tokens, 4, WIDTH).to(BF16), torch.rand(num_tokens, 4)
    want = hc_collapse(x, pre)

    def tail(ranks: ThreadRanks) -> dict[TailOrder, tuple[torch.Tensor, list[int]]]:
        shards = TokenShards(num_tokens, ranks)
        mine = shards.cut(x), shards.cut(pre)
        assert len(mine[0]) == len(mine[1]) == shards.num_local
        found: dict[TailOrder, tuple[torch.Tensor, list[int]]] = {}
        for order in ("collapse first", "gather first"):
            ranks.received = []
            found[order] = head_states(*mine, shards, order), ranks.received
        return found

    told = received_bytes(-(-num_tokens // size), size, 4, WIDTH, 2)
    for found in on_threads(size, tail):
        for order, (got, received) in found.items():
            torch.testing.assert_close(got, want, atol=0, rtol=0)
            assert sum(received) == told[order]
            if num_tokens:
                assert len(received) == {"collapse first": 1, "gather first": 2}[order]


def test_what_is_received_is_the_arithmetic_of_the_payload() -> None:
    """40,976 against 10,240 bytes a row at 5120 columns: 4.0016 times less."""
    found = received_bytes(512, 4, 4, 5120, 2)
    assert found == {"gather first": 3 * 512 * 40_976, "collapse first": 3 * 512 * 10_240}
