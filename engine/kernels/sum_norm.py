"""What lies between a product dealt to ranks and the next one: sum, residual, norm, in one launch.

    total = sum_r delta_r + residual;   y = rms_norm(total) * weight

Every rank writes its delta into memory of the others, which it maps, and sums what it got in rank
order: the same bits everywhere. Sums in float32, rounded once to the residual's dtype. N - 1 times
T * H values go out of each rank. Writes cross a link faster than reads, and need no answer.

How a rank knows that a row has arrived:

- few rows: every 4 bytes travel with the number of the call in one 8-byte write (the protocol that
  NCCL calls LL), so that nobody waits for anything but the values. One program a row.
- more: values alone; then each program tells the same program of the others, by a counter in their
  memory, that its rows are there.

Calls in a row take different places. A rank whose call k has ended has the others' rows of call k;
they wrote those after their call k - 1, so what they read then may be overwritten.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.norms import rms_norm_ref

PLACES = 3
"""Two in turn in a layer, and one more for what begins a step between two layers."""

MAX_PROGRAMS = 512
_PROGRAMS = 264
"""Two for each multiprocessor of an H200: enough to fill a link."""


@dataclass(frozen=True, slots=True)
class Address:
    """Device memory that no tensor of this process holds, as kernels take it.

    Not a tuple: a launcher would take it for several arguments.
    """

    value: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As a tensor says it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Memory that ranks write to, this one's own or another one's as it is mapped here.

    First numbered messages [PLACES, N, words] int64, then plain ones [PLACES, N, num_bytes], by
    sender; then counters [MAX_PROGRAMS, N] int32: calls that a sender's program has made. Zeros at
    first.
    """

    base: int  # address
    size: int  # N
    words: int  # of a numbered message: 4 bytes and a call's number each
    num_bytes: int  # of a plain message, a multiple of 16

    def numbered(self, place: int, sender: int) -> Any:
        """Where a numbered message goes."""
        return self.at((place * self.size + sender) * self.words * 8, torch.int64)

    def plain(self, place: int, sender: int, dtype: torch.dtype) -> Any:
        """Where a plain message goes."""
        before = PLACES * self.size * self.words * 8
        return self.at(before + (place * self.size + sender) * self.num_bytes, dtype)

    def counters(self, sender: int) -> Any:
        """A sender's first counter; its others follow N apart."""
        before = PLACES * self.size * (self.words * 8 + self.num_bytes)
        return self.at(before + sender * 4, torch.int32)

    def at(self, offset: int, dtype: torch.dtype) -> Any:
        """What kernels take for `offset` bytes after the base."""
        return Address(self.base + offset, dtype)

    @staticmethod
    def bytes_needed(size: int, words: int, num_bytes: int) -> int:
        """Of N ranks' mailboxes each."""
        return PLACES * size * (words * 8 + num_bytes) + MAX_PROGRAMS * size * 4


class Post(NamedTuple):
    """Everyone's mailboxes, and how far this rank is."""

    rank: int
    boxes: tuple[Mailbox, ...]  # in rank order
    calls: torch.Tensor  # [2, MAX_PROGRAMS] int32: numbered and plain ones, by program
    stop: torch.Tensor  # [1] int32: not 0 once nobody has to be waited for any more

    @classmethod
    def of(cls, rank: int, boxes: list[Mailbox], device: torch.device) -> "Post":
        """Before the first call."""
        calls = torch.zeros(2, MAX_PROGRAMS, dtype=torch.int32, device=device)
        stop = torch.zeros(1, dtype=torch.int32, device=device)
        return cls(rank, tuple(boxes), calls, stop)

    def numbers(self, x: torch.Tensor) -> bool:
        """May `x` [T, H] be sent in numbered words?"""
        rows, width = x.shape
        fits = rows <= MAX_PROGRAMS and x.numel() <= 2 * self.boxes[0].words
        return fits and x.dtype.itemsize == 2 and width % 2 == 0

    def takes(self, x: torch.Tensor) -> bool:
        """Is there room for `x` [T, H] as plain values?"""
        return x.numel() * x.element_size() <= self.boxes[0].num_bytes


def sum_norm_ref(
    deltas: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels are held to.

    Args:
        deltas: Of each rank, [T, H].
        residual: [T, H] in their dtype.
        weight: [H].
        eps: Added to the mean square.

    Returns:
        The normed sum and the sum, both [T, H] in residual's dtype.
    """
    total = torch.zeros_like(residual, dtype=torch.float32)
    for delta in deltas:
        total = total + delta.float()
    total = (total + residual.float()).to(residual.dtype)
    return rms_norm_ref(total, weight, eps), total


def sum_norm_triton(
    post: Post,
    place: int,
    delta: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    numbered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum_norm_ref` of every rank's delta. All ranks call it, with equal shapes.

    Args:
        post: The ranks' mailboxes.
        place: Another one than in the call before, of [0, PLACES).
        delta: [T, H] float32, bfloat16 or float16: this rank's.
        residual: [T, H] in its dtype, the same on every rank.
        weight: [H] in its dtype.
        eps: Added to the mean square.
        numbered: Send numbered words (where `post.numbers` delta), or plain values.

    Returns:
        The normed sum and the sum, both [T, H] in residual's dtype.
    """
    dims = Dims()
    dims.check("delta", delta, "T H")
    dims.check("residual", residual, "T H", delta.dtype)
    dims.check("weight", weight, "H", delta.dtype)
    delta, residual = delta.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    if not len(residual):
        return normed, total
    launch = _launch_numbered if numbered else _launch_plain
    launch(post, place, (normed, total), (delta, residual, weight), eps)
    return normed, total


Tensors = tuple[torch.Tensor, ...]


def _launch_numbered(post: Post, place: int, out: Tensors, given: Tensors, eps: float) -> None:
    """`out`: normed and total; `given`: delta, residual and weight."""
    rank, size = post.rank, len(post.boxes)
    rows, width = given[0].shape
    block = triton.next_power_of_2(width // 2)
    _numbered_kernel[(rows,)](
        *(x.view(torch.int32) for x in (*out, *given)),
        given[2],
        eps,
        tuple(box.numbered(place, rank) for box in post.boxes),
        tuple(post.boxes[rank].numbered(place, sender) for sender in range(size)),
        post.calls[0],
        post.stop,
        RANK=rank,
        SIZE=size,
        WORDS=width // 2,
        BLOCK=block,
        **dependent(given[0]),
        num_warps=min(max(block // 256, 1), 8),
    )


def _launch_plain(post: Post, place: int, out: Tensors, given: Tensors, eps: float) -> None:
    """As `_launch_numbered`."""
    rank, size, dtype = post.rank, len(post.boxes), given[0].dtype
    mine = post.boxes[rank]
    rows, width = given[0].shape
    block = triton.next_power_of_2(width)
    _plain_kernel[(min(rows, _PROGRAMS),)](
        *out,
        *given,
        eps,
        tuple(box.plain(place, rank, dtype) for box in post.boxes),
        tuple(mine.plain(place, sender, dtype) for sender in range(size)),
        tuple(box.counters(rank) for box in post.boxes),
        mine.counters(0),
        post.calls[1],
        post.stop,
        rows,
        RANK=rank,
        SIZE=size,
        H=width,
        BLOCK=block,
        **dependent(given[0]),
        num_warps=min(max(block // 512, 1), 8),
    )


@triton.jit
def _numbered_kernel(
    normed_ptr,  # [T, WORDS] int32, out: two values each, as all words here
    total_ptr,  # [T, WORDS] int32, out
    delta_ptr,  # [T, WORDS] int32
    residual_ptr,  # [T, WORDS] int32
    weight_ptr,  # [WORDS] int32
    dtype_ptr,  # the values' dtype
    eps,
    out_ptrs,  # by receiver: [T, WORDS] int64 in its memory
    in_ptrs,  # by sender: [T, WORDS] int64 in this rank's memory
    calls_ptr,  # [programs] int32, in and out
    stop_ptr,  # [1] int32
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype = dtype_ptr.dtype.element_ty
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WORDS
    at = row * WORDS + column
    wait_for_inputs(DEPENDENT)
    call = tl.load(calls_ptr + row) + 1
    mine = tl.load(delta_ptr + at, mask=inside, other=0)
    sent = (call.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    for other in tl.static_range(SIZE):
        if other != RANK:
            tl.store(out_ptrs[other] + at, sent, mask=inside)
    tl.store(calls_ptr + row, call)
    residual = tl.load(residual_ptr + at, mask=inside, other=0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        word = mine
        if rank != RANK:
            source = in_ptrs[rank] + at
            got = tl.load(source, mask=inside, other=0, volatile=True)
            missing = tl.sum(((got >> 32).to(tl.int32) != call).to(tl.int32) * inside, 0)
            while missing > 0:
                got = tl.load(source, mask=inside, other=0, volatile=True)
                missing = tl.sum(((got >> 32).to(tl.int32) != call).to(tl.int32) * inside, 0)
                missing *= (tl.load(stop_ptr, volatile=True) == 0).to(tl.int32)
            word = got.to(tl.int32)
        low += _value(word, dtype)
        high += _value(word >> 16, dtype)
    low = (low + _value(residual, dtype)).to(dtype)
    high = (high + _value(residual >> 16, dtype)).to(dtype)
    tl.store(total_ptr + at, _word(low, high), mask=inside)
    low_wide, high_wide = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(low_wide * low_wide + high_wide * high_wide, 0)
    scale = tl.rsqrt(squares / (2 * WORDS) + eps)
    low = (low_wide * scale).to(dtype).to(tl.float32)
    high = (high_wide * scale).to(dtype).to(tl.float32)
    low = (low * _value(weight, dtype)).to(dtype)
    high = (high * _value(weight >> 16, dtype)).to(dtype)
    tl.store(normed_ptr + at, _word(low, high), mask=inside)


@triton.jit
def _value(word, dtype: tl.constexpr):
    """The 16 lower bits of each word, as float32."""
    return word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high):
    """Two 16-bit values as one word."""
    low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | low_bits


@triton.jit(do_not_specialize=["num_rows"])
def _plain_kernel(
    normed_ptr,  # [T, H], out
    total_ptr,  # [T, H], out
    delta_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    eps,
    out_ptrs,  # by receiver: [T, H] in its memory
    in_ptrs,  # by sender: [T, H] in this rank's memory
    told_ptrs,  # by receiver: this rank's counters in its memory, SIZE apart
    heard_ptr,  # [programs, SIZE] int32: the others' counters in this rank's memory
    calls_ptr,  # [programs] int32, in and out
    stop_ptr,  # [1] int32
    num_rows,  # T
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    dtype = normed_ptr.dtype.element_ty
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < H
    wait_for_inputs(DEPENDENT)
    call = tl.load(calls_ptr + program) + 1
    _send(out_ptrs, delta_ptr, program, num_rows, RANK, SIZE, H, BLOCK)
    tl.debug_barrier()  # one thread tells for all of the program
    for other in tl.static_range(SIZE):
        if other != RANK:
            tl.atomic_xchg(told_ptrs[other] + program * SIZE, call, sem="release", scope="sys")
    tl.store(calls_ptr + program, call)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    _wait(heard_ptr, stop_ptr, program, call, RANK, SIZE)
    tl.debug_barrier()
    for row in range(program, num_rows, tl.num_programs(0)):
        at = row * H + column
        x = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                x += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
            else:
                # not from the first-level cache, which may hold what lay there before
                got = tl.load(in_ptrs[rank] + at, mask=inside, other=0.0, cache_modifier=".cg")
                x += got.to(tl.float32)
        x += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(total_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
        normed = (x * scale).to(dtype).to(tl.float32)
        tl.store(normed_ptr + at, (normed * weight).to(dtype), mask=inside)


@triton.jit
def _send(
    out_ptrs,
    delta_ptr,
    program,
    num_rows,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a program's rows to everyone else."""
    column = tl.arange(0, BLOCK)
    inside = column < H
    for row in range(program, num_rows, tl.num_programs(0)):
        at = row * H + column
        mine = tl.load(delta_ptr + at, mask=inside, other=0.0)
        for other in tl.static_range(SIZE):
            if other != RANK:
                tl.store(out_ptrs[other] + at, mine, mask=inside)


@triton.jit
def _wait(heard_ptr, stop_ptr, program, call, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Until the same program of everyone else has told that its rows are here."""
    for other in tl.static_range(SIZE):
        if other != RANK:
            heard = heard_ptr + program * SIZE + other
            # the difference is right where counters wrap
            behind = tl.atomic_add(heard, 0, sem="acquire", scope="sys") - call
            while behind < 0:
                behind = tl.atomic_add(heard, 0, sem="acquire", scope="sys") - call
                behind *= (tl.load(stop_ptr, volatile=True) == 0).to(tl.int32)
