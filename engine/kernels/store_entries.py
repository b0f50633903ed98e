"""Entries of a step into their places (DeepSeek-V4.1): turned, by the token that closes a window.

Entry w of a request, of tokens [w * ratio, (w + 1) * ratio), turns by its first token's position
and lies where `engine.kernels.rolling` says. What other tokens bring is left alone. Moves 2 D
numbers a closed window.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.pair_rope import pair_rope_ref, pair_turns
from engine.kernels.rolling import CompressedState, TokenPlaces, spans


def store_entries(
    x: torch.Tensor,
    state: CompressedState,
    rope: torch.Tensor,
    batch: AttentionBatch,
    positions: torch.Tensor,
    at: TokenPlaces | None,
) -> None:
    """Turn and keep entries.

    Args:
        x: [T, D] in the entries' dtype; those of tokens that close a window count.
        state: Its entries are written.
        rope: [positions, 2, P] float32, cosines and sines; 2P <= D.
        batch: The step's requests.
        positions: [T] int64.
        at: Where tokens belong; the reference takes that from the batch.
    """
    dims = Dims()
    dims.check("state.entries", state.entries, "E D")
    dims.check("x", x, "T D", state.entries.dtype)
    dims.check("positions", positions, "T", torch.int64)
    if at is None:
        store_entries_ref(x, state, rope, batch)
    else:
        store_entries_triton(x, state, rope, batch, positions, at)


def store_entries_ref(
    x: torch.Tensor, state: CompressedState, rope: torch.Tensor, batch: AttentionBatch
) -> None:
    """`store_entries` in torch, a request at a time: the definition a kernel is held to."""
    ratio = state.ratio
    for span in spans(batch):
        first, stop = span.start // ratio, span.stop // ratio
        if first == stop:
            continue
        last = span.begin + (first + 1) * ratio - 1 - span.start
        closing = x[last : span.begin + span.count : ratio]
        turns = rope[first * ratio : stop * ratio : ratio]
        state.entries[span.entries(first, stop, ratio)] = pair_rope_ref(closing[:, None], turns)[
            :, 0
        ]


def store_entries_triton(
    x: torch.Tensor,
    state: CompressedState,
    rope: torch.Tensor,
    batch: AttentionBatch,
    positions: torch.Tensor,
    at: TokenPlaces,
) -> None:
    """`store_entries` as one launch, a program a token."""
    x, width = x.contiguous(), x.shape[1]
    _store_entries_kernel[(len(x),)](
        state.entries,
        x,
        rope,
        positions,
        at.row,
        at.request,
        batch.block_table,
        batch.block_table.stride(0),
        D=width,
        P=rope.shape[2],
        RATIO=state.ratio,
        SIZE=batch.kv_block_size,
        BLOCK=triton.next_power_of_2(width // 2),
        **dependent(x),
    )


@triton.jit
def _store_entries_kernel(
    entries_ptr,  # [E, D], out
    x_ptr,  # [T, D]
    rope_ptr,  # [positions, 2, P]
    position_ptr,  # [T]
    row_ptr,  # [T]
    request_ptr,  # [T]
    table_ptr,  # [R, M]
    table_stride,
    D: tl.constexpr,
    P: tl.constexpr,
    RATIO: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(position_ptr + token)
    if (tl.load(row_ptr + token) >= 0) & ((last + 1) % RATIO == 0):
        place = last + 1 - RATIO  # the window's first position
        pair = tl.arange(0, BLOCK)
        live = pair < D // 2
        a = tl.load(x_ptr + token * D + 2 * pair, mask=live, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + token * D + 2 * pair + 1, mask=live, other=0.0).to(tl.float32)
        cos, sin = pair_turns(rope_ptr + place * 2 * P, pair, D, P)
        table = table_ptr + tl.load(request_ptr + token) * table_stride
        block = tl.load(table + place // SIZE).to(tl.int64)
        entry = (block * SIZE + place % SIZE) // RATIO
        dtype = entries_ptr.dtype.element_ty
        tl.store(entries_ptr + entry * D + 2 * pair, (a * cos - b * sin).to(dtype), mask=live)
        tl.store(entries_ptr + entry * D + 2 * pair + 1, (b * cos + a * sin).to(dtype), mask=live)
