"""What acceptance needs of each logits row, for a share of the vocabulary a program.

    greedy   argmax
    sampled  max of x and sum of 2^(x - max), x = logits / temperature * log2(e)

Reads each row once; rows nobody checks (padding, greedy requests' drafts, drafts that were not
verified) are not read. `merge` puts the shares of a row together.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_triton import best_of, block_for, shares


def target_stats(
    logits: torch.Tensor, cu: torch.Tensor, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima, argmaxima and sums [T, splits] of the target's rows."""
    num_rows, vocab_size = logits.shape
    block = block_for(vocab_size)
    split, each = shares(num_rows, vocab_size, block)
    out = _stats_buffers(num_rows, split, logits.device)
    _target_stats_kernel[(num_rows, split)](
        *out,
        logits,
        logits.stride(0),
        cu,
        logits if temperature is None else temperature,
        len(cu) - 1,
        V=vocab_size,
        TILES=each,
        SAMPLED=temperature is not None,
        BLOCK_R=triton.next_power_of_2(len(cu)),
        BLOCK=block,
    )
    return out


def draft_stats(
    logits: torch.Tensor, cu: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maxima, nothing, and sums [R * G, splits] of the drafts' rows that are needed."""
    num_reqs, gamma, vocab_size = logits.shape
    block = block_for(vocab_size)
    split, each = shares(num_reqs * gamma, vocab_size, block)
    out = _stats_buffers(num_reqs * gamma, split, logits.device)
    if gamma:
        _draft_stats_kernel[(num_reqs * gamma, split)](
            out[0],
            out[2],
            logits,
            logits.stride(0),
            logits.stride(1),
            cu,
            temperature,
            V=vocab_size,
            G=gamma,
            TILES=each,
            BLOCK=block,
        )
    return out


def _stats_buffers(
    num_rows: int, split: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty((num_rows, split), dtype=torch.float32, device=device),
        torch.empty((num_rows, split), dtype=torch.int32, device=device),
        torch.empty((num_rows, split), dtype=torch.float32, device=device),
    )


@triton.jit
def log2_scale(temperature):
    """Logits times this are exponents of 2; temperature > 0."""
    return 1.4426950408889634 / temperature


@triton.jit
def _sum_exp(
    row_ptr, temperature, first, V: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    """Maximum of x over a share, and sum of 2^(x - maximum)."""
    scale = log2_scale(temperature)
    # every lane has its own running maximum, so that no tile waits for a reduction; low but finite,
    # so that -inf minus it is a number
    biggest = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for tile in range(first, tl.minimum(first + TILES, (V + BLOCK - 1) // BLOCK)):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32) * scale
        # one of 2^(x - new) and 2^(old - new) is 1: the other is this
        small = tl.exp2(-tl.abs(x - biggest))
        above = x > biggest
        total = tl.where(above, total * small + 1.0, total + small)
        biggest = tl.where(above, x, biggest)
    top = tl.max(biggest, axis=0)
    return top, tl.sum(total * tl.exp2(biggest - top), axis=0)


@triton.jit(do_not_specialize=["num_reqs"])
def _target_stats_kernel(
    max_ptr,  # [T, splits] float32, out
    id_ptr,  # [T, splits] int32, out; greedy rows
    sum_ptr,  # [T, splits] float32, out; greedy rows: NaN if a logit is NaN, else 1
    logits_ptr,  # [T, V]
    logits_stride,
    cu_ptr,  # [R+1] int32
    temperature_ptr,  # [R] float32; SAMPLED only
    num_reqs,  # R
    V: tl.constexpr,
    TILES: tl.constexpr,
    SAMPLED: tl.constexpr,
    BLOCK_R: tl.constexpr,  # >= R + 1
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if row >= tl.load(cu_ptr + num_reqs):
        return
    first = tl.program_id(1) * TILES
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    if SAMPLED:
        req = tl.arange(0, BLOCK_R)
        ends = tl.load(cu_ptr + 1 + req, mask=req < num_reqs, other=0x7FFFFFFF)
        temperature = tl.load(temperature_ptr + tl.sum((ends <= row).to(tl.int32), axis=0))
        if temperature > 0:
            biggest, total = _sum_exp(row_ptr, temperature, first, V, TILES, BLOCK)
            tl.store(max_ptr + at, biggest)
            tl.store(id_ptr + at, 0)
            tl.store(sum_ptr + at, total)
            return
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32) + first
    bad = tl.zeros([BLOCK], tl.int32)
    for tile in range(first, tl.minimum(first + TILES, (V + BLOCK - 1) // BLOCK)):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        better = x > best
        best = tl.where(better, x, best)
        best_tile = tl.where(better, tile, best_tile)
        bad |= (x != x).to(tl.int32)
    value, token = best_of(best, best_tile, BLOCK)
    tl.store(max_ptr + at, value)
    tl.store(id_ptr + at, token)
    tl.store(sum_ptr + at, tl.where(tl.max(bad, axis=0) > 0, float("nan"), 1.0))


@triton.jit
def _draft_stats_kernel(
    max_ptr,  # [R * G, splits] float32, out
    sum_ptr,  # [R * G, splits] float32, out
    logits_ptr,  # [R, G, V]
    logits_req,
    logits_draft,
    cu_ptr,  # [R+1] int32
    temperature_ptr,  # [R] float32
    V: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    req, draft = row // G, row % G
    temperature = tl.load(temperature_ptr + req)
    num_decided = tl.load(cu_ptr + req + 1) - tl.load(cu_ptr + req)
    if temperature <= 0:
        return
    if draft >= num_decided:
        return
    first = tl.program_id(1) * TILES
    row_ptr = logits_ptr + req.to(tl.int64) * logits_req + draft.to(tl.int64) * logits_draft
    biggest, total = _sum_exp(row_ptr, temperature, first, V, TILES, BLOCK)
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(max_ptr + at, biggest)
    tl.store(sum_ptr + at, total)


@triton.jit
def merge(max_ptr, sum_ptr, row, live, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Shares of the rows `row` [n] together: maxima [n, BLOCK] and [n], sums [n]."""
    share = tl.arange(0, BLOCK)
    at = row[:, None] * SPLIT + share[None, :]
    mask = live[:, None] & (share < SPLIT)[None, :]
    part = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
    biggest = tl.max(part, axis=1)
    shift = tl.where(biggest == float("-inf"), 0.0, biggest)
    total = tl.load(sum_ptr + at, mask=mask, other=0.0) * tl.exp2(part - shift[:, None])
    return part, biggest, tl.sum(total, axis=1)
