"""Compressed KV (DeepSeek-V4): every `ratio` tokens become one entry.

Each token gives values and scores of width W, scores with a bias by place in the window. When token
t closes window w = t // ratio, the entry is

    e_w[c] = sum_slot softmax_slot(score[slot, c]) * value[slot, c]

over the slots of window w and, where windows overlap, of window w-1 too: the older window gives
its first D channels, the newer one its last D. Softmax and sum in float32, per channel; then a norm
and rope at the window's first position. Entries of a step are there before anything attends.

Tokens are kept by place in a ring, entries in KV blocks: see `engine.kernels.rolling`. In V4.1 what
a window becomes is wanted before its rope, too: `pool` gives it by token and keeps no entries.
"""

import torch

from engine.kernels.compress_triton import close_windows
from engine.kernels.contract import Dims
from engine.kernels.norms import rms_norm_ref
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.pair_rope import pair_rope_ref
from engine.kernels.rolling import (
    CompressedState,
    Span,
    TokenPlaces,
    ring_read,
    ring_store,
    ring_write,
    spans,
)


def compress(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    batch: AttentionBatch,
    positions: torch.Tensor,
    at: TokenPlaces | None,
) -> None:
    """Close the windows that end in this step, and keep its tokens.

    Args:
        pairs: [T, 2, W] float32: values, and scores with their bias; W is D, or 2 D with overlap.
        state: Read and written.
        norm: [D], the entries' norm.
        eps: Added to its mean square.
        rope: [positions, 2, P] float32, cosines and sines.
        batch: The step's requests.
        positions: [T] int64.
        at: Where tokens belong; the reference takes that from the batch.
    """
    dims = Dims()
    dims.check("pairs", pairs, "T 2 W", torch.float32)
    dims.check("state.entries", state.entries, "E D")
    dims.check("norm", norm, "D", state.entries.dtype)
    if at is None:
        compress_ref(pairs, state, norm, eps, rope, batch)
    else:
        compress_triton(pairs, state, norm, eps, rope, batch, positions, at)


def pool(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    batch: AttentionBatch,
    positions: torch.Tensor,
    at: TokenPlaces | None,
) -> torch.Tensor:
    """What becomes of the windows that end in this step, normed, not turned; keeps its tokens.

    Args:
        pairs: As for `compress`.
        state: Its tokens are read and written, its entries are not.
        norm: [D], the entries' norm.
        eps: Added to its mean square.
        batch: The step's requests.
        positions: [T] int64.
        at: Where tokens belong; the reference takes that from the batch.

    Returns:
        [T, D] in the entries' dtype, at the token that closes a window; 0 elsewhere.
    """
    dims = Dims()
    dims.check("pairs", pairs, "T 2 W", torch.float32)
    dims.check("norm", norm, "D", state.entries.dtype)
    if at is None:
        return pool_ref(pairs, state, norm, eps, batch)
    return pool_triton(pairs, state, norm, eps, batch, positions, at)


def pool_ref(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    batch: AttentionBatch,
) -> torch.Tensor:
    """`pool` in torch, a request at a time: the definition a kernel is held to."""
    out = pairs.new_zeros((len(pairs), state.entries.shape[1]), dtype=state.entries.dtype)
    for span in spans(batch):
        first, normed = _closed(pairs[span.tokens], state, norm, eps, span)
        if len(normed):
            last = span.begin + (first + 1) * state.ratio - 1 - span.start
            out[last : span.begin + span.count : state.ratio] = normed
        ring_write(state.rows, span.row, span.start, pairs[span.tokens])
    return out


def pool_triton(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    batch: AttentionBatch,
    positions: torch.Tensor,
    at: TokenPlaces,
) -> torch.Tensor:
    """`pool` as one launch, and the rings' new tokens."""
    pairs = pairs.contiguous()
    out = pairs.new_zeros((len(pairs), state.entries.shape[1]), dtype=state.entries.dtype)
    table, size = batch.block_table, batch.kv_block_size
    close_windows(pairs, state, norm, eps, None, positions, at, table, size, by_token=out)
    ring_store(state.rows, pairs, positions, None, at)
    return out


def compress_ref(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """`compress` in torch, a request at a time: the definition a kernel is held to."""
    ratio = state.ratio
    for span in spans(batch):
        first, normed = _closed(pairs[span.tokens], state, norm, eps, span)
        if len(normed):
            stop = first + len(normed)
            turned = pair_rope_ref(normed[:, None], rope[first * ratio : stop * ratio : ratio])
            state.entries[span.entries(first, stop, ratio)] = turned[:, 0]
        ring_write(state.rows, span.row, span.start, pairs[span.tokens])


def compress_triton(
    pairs: torch.Tensor,
    state: CompressedState,
    norm: torch.Tensor,
    eps: float,
    rope: torch.Tensor,
    batch: AttentionBatch,
    positions: torch.Tensor,
    at: TokenPlaces,
) -> None:
    """`compress` as one launch, and the rings' new tokens."""
    table, size = batch.block_table, batch.kv_block_size
    pairs = pairs.contiguous()
    close_windows(pairs, state, norm, eps, rope, positions, at, table, size)
    ring_store(state.rows, pairs, positions, None, at)


def _closed(
    pairs: torch.Tensor, state: CompressedState, norm: torch.Tensor, eps: float, span: Span
) -> tuple[int, torch.Tensor]:
    """The windows that a request closes in this step: the first, and [n, D] of all, normed."""
    ratio, width = state.ratio, state.entries.shape[1]
    first, stop = span.start // ratio, span.stop // ratio
    if first == stop:
        return first, state.entries[:0]
    overlaps = pairs.shape[2] > width
    # windows [first - 1, stop): the older ones from the ring, and none before the first token
    oldest = max(first - 1, 0) if overlaps else first
    kept = ring_read(state.rows, span.row, oldest * ratio, span.start)
    held = torch.cat((kept, pairs[: stop * ratio - span.start])).unflatten(0, (-1, ratio))
    slots = held[first - oldest :, :, :, -width:]
    if overlaps:
        older = held[: stop - 1 - oldest, :, :, :width]
        if first == 0:  # window 0 has none before it: scores that count for nothing
            none = torch.zeros_like(held[:1, :, :, :width])
            none[:, :, 1] = float("-inf")
            older = torch.cat((none, older))
        slots = torch.cat((older, slots), dim=1)
    values, scores = slots[:, :, 0], slots[:, :, 1]
    entries = (values * scores.softmax(dim=1)).sum(dim=1).to(state.entries.dtype)
    return first, rms_norm_ref(entries, norm, eps)
