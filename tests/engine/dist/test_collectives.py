"""Exchanges of tensors against plain references; the same checks run on GPUs in test_nccl.py."""

import pytest
import torch

from engine.dist.collectives import Collectives, Solo, split_rows
from engine.dist.reshard import exchange_vocab, gather_vocab
from tests.helpers.distributed import Ranks, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


def sent(rank: int, peer: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """What `rank` sends to `peer`: numbers that name both."""
    return (torch.arange(rows * 3).view(rows, 3) + 40 * rank + 10 * peer).to(dtype)


def check_all_to_all(ranks: Collectives, splits: list[list[int]], dtype: torch.dtype) -> None:
    """`splits[a][b]` rows go from a to b."""
    me, size, device = ranks.rank, ranks.size, device_of(ranks)
    x = torch.cat([sent(me, peer, splits[me][peer], dtype) for peer in range(size)]).to(device)
    want = torch.cat([sent(peer, me, splits[peer][me], dtype) for peer in range(size)])
    out = torch.full_like(want, 99).to(device)
    ranks.all_to_all_single(out, x, [splits[peer][me] for peer in range(size)], splits[me])
    assert torch.equal(out.cpu(), want), (dtype, splits)


def check_everything(ranks: Collectives) -> None:
    """Every collective, in every dtype, with uneven and empty splits."""
    me, size, device = ranks.rank, ranks.size, device_of(ranks)
    for dtype in DTYPES:
        even = [[2] * size for _ in range(size)]
        uneven = [[(a + 2 * b) % 4 for b in range(size)] for a in range(size)]
        lonely = [[3 * (b == 0) for b in range(size)] for _ in range(size)]
        nothing = [[0] * size for _ in range(size)]
        for splits in (even, uneven, lonely, nothing):
            check_all_to_all(ranks, splits, dtype)
        x = sent(me, 0, 2, dtype).to(device)
        every = torch.stack([sent(rank, 0, 2, dtype) for rank in range(size)])
        assert torch.equal(ranks.all_gather(x).cpu(), every)
        assert torch.equal(ranks.all_reduce(x.clone()).cpu(), every.sum(0).to(dtype))
        assert torch.equal(ranks.broadcast(x.clone()).cpu(), every[0])
    implied = torch.arange(2 * size, device=device)[:, None] + 100 * me
    out = torch.empty_like(implied)
    ranks.all_to_all_single(out, implied)
    theirs = [torch.arange(2 * me, 2 * me + 2) + 100 * rank for rank in range(size)]
    assert torch.equal(out[:, 0].cpu(), torch.cat(theirs))


def device_of(ranks: Collectives) -> torch.device:
    return torch.device("cuda" if "NCCL" in ranks.name else "cpu")


def everything(ranks: Ranks) -> None:
    with torch.inference_mode():
        check_everything(ranks.group().ranks)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gloo(size: int) -> None:
    run_ranks(everything, size)


def test_one_rank() -> None:
    check_everything(Solo())


def vocabulary(ranks: Ranks) -> None:
    """Parts of a vocabulary of 7 become whole rows, padding cut off."""
    group, size = ranks.group().ranks, ranks.size
    whole = torch.arange(4.0 * size * 7).view(4 * size, 7)
    width = -(-7 // size)
    padded = torch.nn.functional.pad(whole, (0, width * size - 7), value=float("nan"))
    part = padded[:, ranks.rank * width : (ranks.rank + 1) * width].contiguous()
    assert torch.equal(gather_vocab(part, 7, group), whole)
    mine = whole.view(size, 4, 7)[ranks.rank]
    assert torch.equal(exchange_vocab(part, 7, group), mine)
    assert torch.equal(exchange_vocab(part[:0], 7, group), whole[:0]), "no rows at all"


@pytest.mark.parametrize("size", [2, 3])
def test_vocabulary_parts_become_rows(size: int) -> None:
    run_ranks(vocabulary, size)


def test_splits_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x: 5 rows cannot be cut into \[2, 2\] for 2 ranks"):
        split_rows(5, [2, 2], 2, "x")
    with pytest.raises(ValueError, match="5 rows cannot be cut into 2 equal parts"):
        split_rows(5, None, 2, "x")


def one_rank_fails(ranks: Ranks) -> None:
    assert ranks.rank == 0, "rank 1 fails on purpose"


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(Exception, match="on purpose"):
        run_ranks(one_rank_fails, 2)
