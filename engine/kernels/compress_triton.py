"""Kernel of `engine.kernels.compress`: a program a token, most of which have no window to close."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.pair_rope import pair_turns
from engine.kernels.rolling import CompressedState, TokenPlaces


def close_windows(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    rope: torch.Tensor | None,
    positions: torch.Tensor,
    at: TokenPlaces,
    block_table: torch.Tensor,
    kv_block_size: int,
    *,
    by_token: torch.Tensor | None = None,
) -> None:
    """Make the entries of all windows that the step closes.

    Args:
        pairs: [T, 2, W] float32, contiguous.
        state: Rings are read, entries written.
        norm: [D].
        eps: Of the norm.
        rope: [positions, 2, P] float32; None with `by_token`.
        positions: [T] int64.
        at: Where tokens belong.
        block_table: [R, M] int32.
        kv_block_size: Tokens of a block.
        by_token: [T, D], zeros: takes what tokens close, not turned, and no entries are written.
    """
    assert (rope is None) == (by_token is not None)
    num_tokens, _, wide = pairs.shape
    width = state.entries.shape[1]
    _close_kernel[(num_tokens,)](
        state.entries if by_token is None else by_token,
        pairs,
        state.rows,
        norm,
        pairs if rope is None else rope,
        positions,
        at.row,
        at.request,
        at.begin,
        at.start,
        block_table,
        block_table.stride(0),
        eps,
        D=width,
        W=wide,
        P=0 if rope is None else rope.shape[2],
        RATIO=state.ratio,
        OVERLAP=wide // width,
        PLACES=state.rows.shape[1],
        SIZE=kv_block_size,
        BLOCK=triton.next_power_of_2(width // 2),
        BY_TOKEN=by_token is not None,
        **dependent(pairs),
    )


@triton.jit
def _close_kernel(
    entries_ptr,  # [E, D], out; BY_TOKEN: [T, D]
    pairs_ptr,  # [T, 2, W]
    rows_ptr,  # [N, PLACES, 2, W]
    norm_ptr,  # [D]
    rope_ptr,  # [positions, 2, P]; not BY_TOKEN only
    position_ptr,  # [T]
    row_ptr,  # [T]
    request_ptr,  # [T]
    begin_ptr,  # [T]
    start_ptr,  # [T]
    table_ptr,  # [R, M]
    table_stride,
    eps,
    D: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    PLACES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + token)
    last = tl.load(position_ptr + token)
    if (row >= 0) & ((last + 1) % RATIO == 0):
        begin, start = tl.load(begin_ptr + token), tl.load(start_ptr + token)
        pair = tl.arange(0, BLOCK)
        live = pair < D // 2
        most_a = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        most_b = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        sum_a, sum_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        a, b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        first = last + 1 - OVERLAP * RATIO
        for slot in tl.range(OVERLAP * RATIO):
            p = first + slot
            if p >= 0:
                # the older window gives its first channels, the newer one its last
                half = tl.where(slot >= (OVERLAP - 1) * RATIO, W - D, 0)
                from_step = pairs_ptr + (begin + p - start) * 2 * W
                from_ring = rows_ptr + (row * PLACES + p % PLACES) * 2 * W
                keep = live & (p + 0 * pair >= start)
                kept = live & (p + 0 * pair < start)
                at = half + 2 * pair
                value_a = tl.load(from_step + at, mask=keep, other=0.0)
                value_a += tl.load(from_ring + at, mask=kept, other=0.0)
                value_b = tl.load(from_step + at + 1, mask=keep, other=0.0)
                value_b += tl.load(from_ring + at + 1, mask=kept, other=0.0)
                score_a = tl.load(from_step + W + at, mask=keep, other=0.0)
                score_a += tl.load(from_ring + W + at, mask=kept, other=0.0)
                score_b = tl.load(from_step + W + at + 1, mask=keep, other=0.0)
                score_b += tl.load(from_ring + W + at + 1, mask=kept, other=0.0)
                most = tl.maximum(most_a, score_a)
                shrink, grow = tl.exp(most_a - most), tl.exp(score_a - most)
                a, sum_a, most_a = a * shrink + value_a * grow, sum_a * shrink + grow, most
                most = tl.maximum(most_b, score_b)
                shrink, grow = tl.exp(most_b - most), tl.exp(score_b - most)
                b, sum_b, most_b = b * shrink + value_b * grow, sum_b * shrink + grow, most
        dtype = entries_ptr.dtype.element_ty
        a = tl.where(live, (a / sum_a).to(dtype).to(tl.float32), 0.0)
        b = tl.where(live, (b / sum_b).to(dtype).to(tl.float32), 0.0)
        scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
        norm_a = tl.load(norm_ptr + 2 * pair, mask=live, other=0.0).to(tl.float32)
        norm_b = tl.load(norm_ptr + 2 * pair + 1, mask=live, other=0.0).to(tl.float32)
        a = ((a * scale).to(dtype).to(tl.float32) * norm_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * norm_b).to(dtype).to(tl.float32)
        entry = token
        if not BY_TOKEN:
            place = last + 1 - RATIO  # the window's first position
            cos, sin = pair_turns(rope_ptr + place * 2 * P, pair, D, P)
            a, b = a * cos - b * sin, b * cos + a * sin
            table = table_ptr + tl.load(request_ptr + token) * table_stride
            block = tl.load(table + place // SIZE).to(tl.int64)
            entry = (block * SIZE + place % SIZE) // RATIO
        tl.store(entries_ptr + entry * D + 2 * pair, a.to(dtype), mask=live)
        tl.store(entries_ptr + entry * D + 2 * pair + 1, b.to(dtype), mask=live)
