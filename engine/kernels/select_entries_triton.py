"""Kernel of `engine.kernels.select_entries`: scores of all closed entries, as keys that sort."""

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.rolling import CompressedState, TokenPlaces

_BLOCK_E = 64


def score_keys(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    positions: torch.Tensor,
    at: TokenPlaces,
    block_table: torch.Tensor,
    kv_block_size: int,
    most: int,
    inside: torch.Tensor | None = None,
    block: int = 1,
) -> torch.Tensor:
    """[T, most] int64 keys: higher scores above, of equal ones the earlier entry; -1: not closed.

    Args:
        q: [T, N, D], contiguous.
        weights: [T, N] float32.
        state: Index keys.
        positions: [T] int64.
        at: Where tokens belong.
        block_table: [R, M] int32.
        kv_block_size: Tokens of a block.
        most: Entries that any request may have; with `inside`, those of its blocks.
        inside: [T, B] int32, blocks of entries to look at, -1 for none; None: all entries.
        block: Entries of such a block.
    """
    num_tokens, heads, width = q.shape
    keys = torch.empty((num_tokens, most), dtype=torch.int64, device=q.device)
    _score_kernel[(num_tokens, triton.cdiv(most, _BLOCK_E))](
        keys,
        q,
        weights,
        state.entries,
        positions,
        at.row,
        at.request,
        block_table,
        block_table.stride(0),
        at.row if inside is None else inside,
        most,
        width**-0.5,
        N=heads,
        D=width,
        RATIO=state.ratio,
        SIZE=kv_block_size,
        BLOCK_N=max(16, triton.next_power_of_2(heads)),
        BLOCK_D=max(16, triton.next_power_of_2(width)),
        BLOCK_E=_BLOCK_E,
        INSIDE=0 if inside is None else block,
        **dependent(q),
    )
    return keys


@triton.jit
def _score_kernel(
    keys_ptr,  # [T, most], out
    q_ptr,  # [T, N, D]
    weights_ptr,  # [T, N]
    entries_ptr,  # [E, D]
    position_ptr,  # [T]
    row_ptr,  # [T]
    request_ptr,  # [T]
    table_ptr,  # [R, M]
    table_stride,
    inside_ptr,  # [T, most / INSIDE]; INSIDE > 0 only
    most,
    scale,
    N: tl.constexpr,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    INSIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at_key = tl.program_id(1).to(tl.int64) * BLOCK_E + tl.arange(0, BLOCK_E)
    closed = (tl.load(position_ptr + token) + 1) // RATIO
    closed = tl.where(tl.load(row_ptr + token) >= 0, closed, 0)
    if INSIDE > 0:
        held = inside_ptr + token * (most // INSIDE) + at_key // INSIDE
        inside = tl.load(held, mask=at_key < most, other=-1).to(tl.int64)
        entry = inside * INSIDE + at_key % INSIDE
        live = (inside >= 0) & (entry < closed)
        some = tl.max(live.to(tl.int32), axis=0) > 0
    else:
        entry = at_key
        live = entry < closed
        some = tl.program_id(1).to(tl.int64) * BLOCK_E < closed
    key = tl.full([BLOCK_E], -1, dtype=tl.int64)
    if some:
        table = table_ptr + tl.load(request_ptr + token) * table_stride
        first = entry * RATIO
        block = tl.load(table + first // SIZE, mask=live, other=0).to(tl.int64)
        place = (block * SIZE + first % SIZE) // RATIO
        head, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        keep = (head < N)[:, None] & (column < D)[None, :]
        at = (token * N + head)[:, None] * D + column[None, :]
        q = tl.load(q_ptr + at, mask=keep, other=0.0)
        keep = live[:, None] & (column < D)[None, :]
        k = tl.load(entries_ptr + place[:, None] * D + column[None, :], mask=keep, other=0.0)
        dots = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0) * scale
        weight = tl.load(weights_ptr + token * N + head, mask=head < N, other=0.0)
        score = tl.sum(dots * weight[:, None], axis=0) + 0.0  # no negative zero
        # floats as 32 bits in their order; below them the entry's number, counted down
        bits = score.to(tl.int32, bitcast=True).to(tl.int64)
        ordered = tl.where(bits < 0, -1 - bits, bits + (1 << 31))
        key = tl.where(live, (ordered << 31) + (0x7FFFFFFF - entry), -1)
    tl.store(keys_ptr + token * most + at_key, key, mask=at_key < most)
