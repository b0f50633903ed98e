"""The sum over ranks, residual and norm in one launch. Ranks take turns here."""

from dataclasses import dataclass

import pytest
import torch

from engine.kernels.sum_norm import (
    MAX_PROGRAMS,
    PLACES,
    Mailbox,
    Post,
    sum_norm_ref,
    sum_norm_triton,
)
from tests.engine.kernels.test_layer_kernels import DTYPES, held, randn
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]
EPS = 1e-5
WORDS, BYTES = 4096, 1 << 15


@dataclass(frozen=True, slots=True)
class Held(Mailbox):
    """A mailbox in a tensor."""

    memory: torch.Tensor

    def at(self, offset: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[offset:].view(dtype)


def posts(size: int) -> list[Post]:
    needed = Mailbox.bytes_needed(size, WORDS, BYTES)
    boxes: list[Mailbox] = [
        Held(0, size, WORDS, BYTES, torch.zeros(needed, dtype=torch.uint8, device=KERNEL_DEVICE))
        for _ in range(size)
    ]
    return [Post.of(rank, boxes, torch.device(KERNEL_DEVICE)) for rank in range(size)]


def deliver(post: Post, place: int, deltas: list[torch.Tensor], call: int) -> None:
    """What the others would have written before this rank comes: nobody has to wait."""
    box, size = post.boxes[post.rank], len(post.boxes)
    for sender, delta in enumerate(deltas):
        if sender == post.rank:
            continue
        raw = delta.contiguous().view(-1)
        box.plain(place, sender, delta.dtype)[: len(raw)] = raw
        box.counters(sender)[: len(delta) * size : size] = call
        if delta.dtype.itemsize == 2:
            words = raw.view(torch.int32).long() & 0xFFFFFFFF
            box.numbered(place, sender)[: len(words)] = (call << 32) | words


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1024), (3, 100)])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numbered", [True, False])
def test_every_rank_gets_the_same(
    numbered: bool, size: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    ranks = posts(size)
    residual, weight = randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    if numbered and dtype == torch.float32:
        assert not ranks[0].numbers(residual)
        return
    for call in (1, 2, 3):
        place = call % PLACES
        deltas = [randn(rows, width, dtype=dtype) for _ in range(size)]
        found = []
        for post, delta in zip(ranks, deltas, strict=True):
            deliver(post, place, deltas, call)
            found.append(
                sum_norm_triton(post, place, delta, residual, weight, EPS, numbered=numbered)
            )
        want = sum_norm_ref(deltas, residual, weight, EPS)
        wide = [delta.float() for delta in deltas]
        exact = sum_norm_ref(wide, residual.float(), weight.float(), EPS)
        for i in range(2):
            held(found[0][i], exact[i], want[i])
            assert all(torch.equal(f[i], found[0][i]) for f in found)


@pytest.mark.parametrize("numbered", [True, False])
def test_what_others_get(numbered: bool) -> None:
    """Values where the receiver looks for them, under the number it waits for; nothing else."""
    me = posts(2)[0]
    delta, weight = randn(3, 8, dtype=torch.float16), randn(8, dtype=torch.float16)
    me.calls[:] = 2**31 - 2  # the next number is the largest one, and then they go on below 0
    for call, number in ((1, 2**31 - 1), (2, -(2**31))):
        deliver(me, 1, [delta, delta], number)
        sum_norm_triton(me, 1, delta, delta, weight, EPS, numbered=numbered)
        assert me.calls[int(not numbered), :4].tolist() == [number] * 3 + [2**31 - 2], call
    box = me.boxes[1]
    assert isinstance(box, Held)
    found = box.memory.clone()
    if numbered:
        got = box.numbered(1, 0)[:12].clone()
        assert torch.equal(got.int(), delta.view(torch.int32).view(-1))
        assert (got >> 32).tolist() == [-(2**31)] * 12
        box.numbered(1, 0)[:12] = 0
    else:
        assert torch.equal(box.plain(1, 0, torch.float16)[:24], delta.view(-1))
        box.plain(1, 0, torch.float16)[:24] = 0
        assert box.counters(0)[: 4 * 2 : 2].tolist() == [-(2**31)] * 3 + [0]
        box.counters(0)[: 3 * 2 : 2] = 0
    assert not bool(box.memory.any()), found.nonzero()


@pytest.mark.parametrize("numbered", [True, False])
def test_nobody_waits_once_that_is_over(numbered: bool) -> None:
    """The other rank never comes; without the word to stop this would wait for ever."""
    me, x = posts(2)[0], randn(3, 8, dtype=torch.float16)
    me.stop.fill_(1)
    sum_norm_triton(me, 0, x, x, x[0], EPS, numbered=numbered)


def test_what_fits() -> None:
    post = posts(2)[0]
    assert post.numbers(torch.zeros(1, 2 * WORDS, dtype=torch.float16))
    assert not post.numbers(torch.zeros(2, 2 * WORDS, dtype=torch.float16))
    assert not post.numbers(torch.zeros(1, 8))
    assert not post.numbers(torch.zeros(2, 7, dtype=torch.float16))
    assert not post.numbers(torch.zeros(MAX_PROGRAMS + 1, 2, dtype=torch.float16))
    assert post.takes(torch.zeros(1, BYTES // 4))
    assert not post.takes(torch.zeros(1, BYTES // 4 + 1))


def test_no_rows() -> None:
    x = torch.zeros(0, 8, device=KERNEL_DEVICE)
    zeros = torch.zeros(8, device=KERNEL_DEVICE)
    normed, total = sum_norm_triton(posts(2)[0], 0, x, x, zeros, EPS, numbered=False)
    assert normed.shape == total.shape == (0, 8)


def test_an_address_is_an_argument_of_its_own() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    found = Mailbox(1 << 30, 2, WORDS, BYTES)
    given = (found.numbered(0, 1), found.counters(1))
    kinds = native_specialize_impl(BaseBackend, given, False, True, True)
    assert kinds == (("*i64", "*i32"), ("D", ""))  # D: a multiple of 16, so that loads are wide
