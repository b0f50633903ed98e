"""What is asked of NCCL, with a library that moves host memory; real exchanges: test_nccl.py."""

import ctypes
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.dist.pynccl import _TYPES, PyNccl
from engine.errors import DSparkError
from tests.engine.dist.test_collectives import DTYPES, sent

SIZES = {code: dtype.itemsize for dtype, code in _TYPES.items()}


class FakeNccl:
    """Collects sends and receives of all ranks, in groups as NCCL wants them, then moves bytes."""

    def __init__(self) -> None:
        self.rank = 0
        self.open = 0
        self.sends: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def version(self) -> str:
        return "2.0.0"

    def call(self, name: str, *given: Any) -> None:
        if name == "ncclCommInitRank":
            given[0]._obj.value = 1 + given[3]
        elif name in ("ncclGroupStart", "ncclGroupEnd"):
            self.open += 1 if name == "ncclGroupStart" else -1
        elif name in ("ncclSend", "ncclRecv"):
            assert self.open == 1, "outside of a group a send waits for its receive"
            pointer, count, kind, peer, *_ = given
            assert count > 0, "a side without rows stays silent"
            key = (self.rank, peer) if name == "ncclSend" else (peer, self.rank)
            book = self.sends if name == "ncclSend" else self.receives
            book[key].append((pointer, count * SIZES[kind]))
        elif name != "ncclCommAbort":
            raise AssertionError(name)

    def deliver(self) -> None:
        assert self.sends.keys() == self.receives.keys()
        for key, sends in self.sends.items():
            for (source, given), (target, room) in zip(sends, self.receives[key], strict=True):
                assert given == room
                ctypes.memmove(target, source, given)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeNccl, list[PyNccl]]:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    library: Any = FakeNccl()
    cpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _d: __import__("contextlib").nullcontext())
    return library, [PyNccl(library, r, 3, [7] * 128, cpu) for r in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_of_uneven_and_empty_splits(
    ranks: tuple[FakeNccl, list[PyNccl]], dtype: torch.dtype
) -> None:
    library, comms = ranks
    splits = [[2, 0, 3], [0, 0, 1], [1, 4, 0]]
    xs = [torch.cat([sent(a, b, splits[a][b], dtype) for b in range(3)]) for a in range(3)]
    wants = [torch.cat([sent(a, b, splits[a][b], dtype) for a in range(3)]) for b in range(3)]
    outs = [torch.full_like(want, 99) for want in wants]
    for comm, out, x in zip(comms, outs, xs, strict=True):
        library.rank = comm.rank
        received = [splits[a][comm.rank] for a in range(3)]
        comm.all_to_all_single(out, x, received, splits[comm.rank])
    library.deliver()
    for out, want in zip(outs, wants, strict=True):
        assert torch.equal(out, want)


def test_mismatched_sides_are_refused_before_nccl_hears_of_them(
    ranks: tuple[FakeNccl, list[PyNccl]],
) -> None:
    comm = ranks[1][0]
    x = torch.zeros(3, 2)
    with pytest.raises(ValueError, match="out is torch.int64"):
        comm.all_to_all_single(torch.zeros(3, 2, dtype=torch.int64), x)
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_to_all_single(torch.zeros(2, 3).t(), x)
    with pytest.raises(ValueError, match="keeps 1 rows for itself and expects 2"):
        comm.all_to_all_single(torch.zeros(3, 2), x, [2, 1, 0], [1, 1, 1])
    assert not ranks[0].sends


def test_nothing_is_exchanged_after_an_abort(ranks: tuple[FakeNccl, list[PyNccl]]) -> None:
    comm = ranks[1][0]
    comm.abort()
    comm.abort()
    with pytest.raises(DSparkError, match="communicator has been closed"):
        comm.broadcast(torch.zeros(1))
