"""The same exchanges between GPUs, alone and replayed from graphs. Run by hand: -m multi_gpu."""

import time
from typing import Any

import pytest
import torch

from engine.dist.collectives import Collectives, TorchCollectives
from engine.dist.mapped import NUMBERED, PLAIN, SIZES, Mapped
from engine.kernels.capture import capture
from engine.kernels.sum_norm import sum_norm_ref
from tests.engine.dist.test_collectives import DTYPES, check_everything
from tests.helpers.distributed import Ranks, run_ranks

pytestmark = pytest.mark.multi_gpu
REPLAYS = 100


def torchs_own(ranks: Ranks) -> TorchCollectives:
    c10d: Any = torch.distributed
    options = c10d.ProcessGroupNCCL.Options()
    store = c10d.PrefixStore("torch", ranks.store)
    return TorchCollectives(
        c10d.ProcessGroupNCCL(store, ranks.rank, ranks.size, options), "torch's NCCL"
    )


def check_replayed(group: Collectives, dtype: torch.dtype) -> None:
    """An all-to-all with fixed uneven splits and the others, with new contents every time."""
    me, size = group.rank, group.size
    splits = [[(a + 2 * b) % 4 for b in range(size)] for a in range(size)]
    rows_in, rows_out = sum(splits[me]), sum(splits[a][me] for a in range(size))
    x = torch.zeros(rows_in, 5, dtype=dtype, device="cuda")
    received = [splits[a][me] for a in range(size)]

    def exchange() -> torch.Tensor:
        out = torch.empty(rows_out, 5, dtype=dtype, device="cuda")
        group.all_to_all_single(out, x, received, splits[me])
        return out

    y = torch.zeros(3, 64, dtype=dtype, device="cuda")
    graphs = [
        capture(exchange),
        capture(lambda: group.all_gather(y)),
        capture(lambda: group.all_reduce(y * 1)),
        capture(lambda: group.broadcast(y * 1)),
    ]
    for turn in range(REPLAYS):
        x.fill_((10 * me + turn) % 100)
        y.fill_((me + turn) % 50)
        for graph, _ in graphs:
            graph.replay()
        exchanged, gathered, summed, told = (out for _, out in graphs)
        want = torch.cat(
            [
                torch.full((splits[a][me], 5), (10 * a + turn) % 100, dtype=dtype)
                for a in range(size)
            ]
        )
        assert torch.equal(exchanged.cpu(), want), turn
        values = [(a + turn) % 50 for a in range(size)]
        assert gathered[:, 0, 0].tolist() == values
        assert set(summed.flatten().tolist()) == {sum(values)}
        assert set(told.flatten().tolist()) == {values[0]}


def pynccl(ranks: Ranks) -> None:
    group = ranks.group(all_reduce="nccl").ranks
    assert group.name.startswith("NCCL ")
    with torch.inference_mode():
        check_everything(group)
        for dtype in DTYPES:
            check_replayed(group, dtype)
    print(f"rank {ranks.rank}: {group.name}: every exchange right, {REPLAYS} replays each")


def test_pynccl_alone_and_in_graphs() -> None:
    run_ranks(pynccl, 2, device="cuda")


def fallback(ranks: Ranks) -> None:
    group = torchs_own(ranks)
    with torch.inference_mode():
        check_everything(group)
        check_replayed(group, torch.bfloat16)


def test_torchs_own_nccl_is_a_fallback() -> None:
    run_ranks(fallback, 2, device="cuda")


def no_second_set_of_buffers(ranks: Ranks) -> None:
    """Memory outside torch's allocator: pynccl's exchanges, then a second communicator's."""

    def outside() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    x = torch.zeros(2 << 20, 16, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(x)
    steps = [outside()]
    group = ranks.group(all_reduce="nccl").ranks
    for body in (
        lambda: group.all_reduce(x),
        lambda: group.all_to_all_single(out, x),
        lambda: group.all_to_all_single(out, x),
    ):
        body()
        steps.append(outside())
    once = steps[-1]
    torchs_own(ranks).all_to_all_single(out, x)
    again = outside()
    mib = [round(s / 2**20) for s in (*steps, again)]
    print(
        f"rank {ranks.rank}: MiB outside torch's allocator: start {mib[0]}, all-reduce {mib[1]}, "
        f"all-to-all {mib[2]}, again {mib[3]}; with torch's own communicator {mib[4]}"
    )
    assert steps[3] == steps[2], "a second exchange takes nothing more"
    assert again - once > 16 << 20, "a second communicator would take its own buffers"


def test_one_communicator_has_one_set_of_buffers() -> None:
    run_ranks(no_second_set_of_buffers, 2, device="cuda")


def mapped(ranks: Ranks) -> None:
    group = ranks.group()
    found = group.ranks
    assert isinstance(found, Mapped), "the GPUs of this host cannot map each other's memory"
    print(f"rank {ranks.rank}: {found.name}")
    generator = torch.Generator(device="cuda").manual_seed(ranks.rank)
    residual = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    residual, weight = found.broadcast(residual), found.broadcast(weight)
    with torch.inference_mode():
        check_everything(found)
        check_replayed(found, torch.bfloat16)
        for way in (NUMBERED, PLAIN):
            found.taken = [way] * len(SIZES)
            for rows in (1, 3, 64, 130, 512, 2048):
                for dtype in (torch.bfloat16, torch.float32):
                    if rows * 4096 * dtype.itemsize <= SIZES[-1]:
                        check_sums(found, residual[:rows].to(dtype), weight.to(dtype), generator)


def check_sums(
    found: Mapped, residual: torch.Tensor, weight: torch.Tensor, generator: torch.Generator
) -> None:
    """Products in turn in one graph, with new contents every replay: every sum is right."""
    rows, width = residual.shape
    x = torch.zeros(4, rows, width, dtype=residual.dtype, device="cuda")

    def layers() -> torch.Tensor:
        sums, stream = [], residual
        for i, part in enumerate(x):
            normed, stream = found.add_rms_norm(part, stream, weight, 1e-6, i % 2)
            sums += [normed, stream]
        return torch.stack(sums)

    graph, out = capture(layers)
    for turn in range(REPLAYS // 4):
        x.normal_(generator=generator)
        graph.replay()
        every = found.all_gather(x)
        want, stream = [], residual
        for i in range(len(x)):
            normed, stream = sum_norm_ref(list(every[:, i]), stream, weight, 1e-6)
            want += [normed, stream]
        torch.testing.assert_close(out[1::2], torch.stack(want[1::2]), rtol=0, atol=0)
        torch.testing.assert_close(out[::2], torch.stack(want[::2]), rtol=2**-6, atol=1e-5)
        theirs = found.all_gather(out)
        assert torch.equal(theirs[0], theirs[1]), (turn, "not the same bits")


def left_alone(ranks: Ranks) -> None:
    """Rank 0 waits for a sum that rank 1 never makes, until it is told to let go."""
    found = ranks.group().ranks
    assert isinstance(found, Mapped)
    x = torch.zeros(3, 4096, dtype=torch.bfloat16, device="cuda")
    if ranks.rank == 0:
        for way in (NUMBERED, PLAIN):
            found.taken = [way] * len(SIZES)
            found.add_rms_norm(x, x, x[0], 1e-6, 0)
        done = torch.cuda.Event()
        done.record()
        time.sleep(0.5)
        assert not done.query(), "nobody has come"
        found.abort()
        done.synchronize()


def test_a_sum_that_nobody_joins_can_be_left() -> None:
    run_ranks(left_alone, 2, device="cuda", timeout=60)


def test_sums_through_mapped_memory() -> None:
    run_ranks(mapped, 2, device="cuda")
