"""Kernel of `engine.kernels.window_attention`: a program for a token and some of its heads."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.rolling import CompressedState, TokenPlaces

_BLOCK_J = 32
_SUMS = 64 * 256


def attend_windows(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    at: TokenPlaces,
    block_table: torch.Tensor,
    kv_block_size: int,
    *,
    window: int,
    scale: float,
    compressed: CompressedState | None,
    chosen: torch.Tensor | None,
    block: bool,
) -> torch.Tensor:
    """[T, Q, D]; arguments as for `window_attention`, and where tokens belong."""
    q, kv = q.contiguous(), kv.contiguous()
    num_tokens, heads, width = q.shape
    out = torch.empty_like(q)
    block_d = max(16, triton.next_power_of_2(width))
    # what is summed up lies in registers: 64 a thread; keys of float32 take twice the memory
    sums, block_j = (_SUMS, _BLOCK_J) if q.element_size() < 4 else (_SUMS // 2, _BLOCK_J // 2)
    block_h = max(16, min(triton.next_power_of_2(heads), sums // block_d))
    entries = kv if compressed is None else compressed.entries
    picks = at.request if chosen is None else chosen
    _window_kernel[(num_tokens, triton.cdiv(heads, block_h))](
        out,
        q,
        kv,
        sinks,
        ring,
        entries,
        picks,
        positions,
        at.row,
        at.request,
        at.begin,
        at.start,
        at.stop,
        block_table,
        block_table.stride(0),
        scale,
        Q=heads,
        D=width,
        WINDOW=window,
        PLACES=ring.shape[1],
        DRAFT=block,
        RATIO=0 if compressed is None else compressed.ratio,
        PICKS=0 if chosen is None else chosen.shape[1],
        SIZE=kv_block_size,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BLOCK_J=block_j,
        **dependent(q),
        num_warps=8,
        num_stages=2,
    )
    return out


@triton.jit
def _attend(q, k, live, most, total, out, scale):
    """Take some keys [J, D] into account."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(live[None, :], scores, float("-inf"))
    new = tl.maximum(most, tl.max(scores, axis=1))
    shrink = tl.exp(most - new)
    shares = tl.exp(scores - new[:, None])
    total = total * shrink + tl.sum(shares, axis=1)
    out = out * shrink[:, None]
    return new, total, tl.dot(shares.to(k.dtype), k, out, input_precision="ieee")


@triton.jit
def _window_kernel(
    out_ptr,  # [T, Q, D], out
    q_ptr,  # [T, Q, D]
    kv_ptr,  # [T, D]
    sinks_ptr,  # [Q]
    ring_ptr,  # [N, PLACES, D]
    entries_ptr,  # [E, D]; RATIO > 0 only
    chosen_ptr,  # [T, PICKS]; PICKS > 0 only
    position_ptr,  # [T]
    row_ptr,  # [T]
    request_ptr,  # [T]
    begin_ptr,  # [T]
    start_ptr,  # [T]
    stop_ptr,  # [T]
    table_ptr,  # [R, M]
    table_stride,
    scale,
    Q: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFT: tl.constexpr,
    RATIO: tl.constexpr,
    PICKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_J: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    in_width = column < D
    heads = (head < Q)[:, None] & in_width[None, :]
    at = (token * Q + head)[:, None] * D + column[None, :]
    row = tl.load(row_ptr + token)
    out = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    # the sink is a key whose value is 0
    most = tl.load(sinks_ptr + head, mask=head < Q, other=0.0)
    total = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
    if row >= 0:
        q = tl.load(q_ptr + at, mask=heads, other=0.0)
        position, start = tl.load(position_ptr + token), tl.load(start_ptr + token)
        begin = tl.load(begin_ptr + token)
        if DRAFT:
            first, last = tl.maximum(start - WINDOW, 0), tl.load(stop_ptr + token)
        else:
            first, last = tl.maximum(position - WINDOW + 1, 0), position + 1
        for j in tl.range(first, last, BLOCK_J):
            key = j + tl.arange(0, BLOCK_J)
            old, new = key < start, (key >= start) & (key < last)
            from_ring = ring_ptr + (row * PLACES + key % PLACES) * D
            from_step = kv_ptr + (begin + key - start) * D
            keep = old[:, None] & in_width[None, :]
            k = tl.load(from_ring[:, None] + column[None, :], mask=keep, other=0.0)
            keep = new[:, None] & in_width[None, :]
            k += tl.load(from_step[:, None] + column[None, :], mask=keep, other=0.0)
            most, total, out = _attend(q, k, key < last, most, total, out, scale)
        if RATIO > 0:
            closed = (position + 1) // RATIO
            table = table_ptr + tl.load(request_ptr + token) * table_stride
            end = closed
            if PICKS > 0:
                # what was chosen comes before what was not
                end = tl.minimum(tl.load(stop_ptr + token) // RATIO, PICKS)
            for e in tl.range(0, end, BLOCK_J):
                entry = e + tl.arange(0, BLOCK_J).to(tl.int64)
                live = entry < end
                if PICKS > 0:
                    picked = tl.load(chosen_ptr + token * PICKS + entry, mask=live, other=-1)
                    entry = picked.to(tl.int64)
                    live = entry >= 0
                place = tl.where(live, entry, 0) * RATIO
                held = tl.load(table + place // SIZE, mask=live, other=0).to(tl.int64)
                where = (held * SIZE + place % SIZE) // RATIO
                keep = live[:, None] & in_width[None, :]
                at_k = entries_ptr + where[:, None] * D + column[None, :]
                k = tl.load(at_k, mask=keep, other=0.0)
                most, total, out = _attend(q, k, live, most, total, out, scale)
    out = out / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=heads)
