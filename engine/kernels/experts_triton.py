"""Kernels of a mixture's experts: a plan of tiles, products by expert, weighted sums by token."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.packed_layout import Laid
from engine.kernels.packed_linear import (
    Tile,
    packed_arguments,
    packed_tile,
    runs_asm,
    scale_inputs,
    scale_rows,
)

_BLOCK = 1024


class Tiles(NamedTuple):
    """Pairs of token and expert by expert. M pairs, E experts, B tiles of at most BLOCK_M pairs."""

    order: torch.Tensor  # [M] int64, pairs by expert; those of other ranks last
    place: torch.Tensor  # [M] int64, where each pair is in `order`; -1: its expert is not here
    expert: torch.Tensor  # [B] int32, of each tile; E where there is no tile
    start: torch.Tensor  # [B] int32, its first pair in `order`
    stops: torch.Tensor  # [E] int32, where each expert's pairs end
    block_m: int


def plan_tiles(experts: torch.Tensor, count: int, among: int | None = None) -> Tiles:
    """Sort pairs by expert and cut them into tiles; shapes follow from T, k and E alone.

    Args:
        experts: [T, k] int64, numbers of this rank's experts; others are below 0 or above.
        count: E.
        among: Experts of all ranks.
    """
    flat = experts.flatten()
    block_m = rows_of(len(flat) / (among or count))
    impl = plan_tiles_triton if flat.is_cuda else plan_tiles_ref
    return impl(flat, count, block_m)


def rows_of(pairs: float) -> int:
    """Rows of a tile by how many pairs an expert has on average: most have one tile."""
    if pairs <= 12:
        return 16
    return 32 if pairs <= 26 else 64


def plan_tiles_ref(flat: torch.Tensor, count: int, block_m: int) -> Tiles:
    """`plan_tiles` in torch, of pairs [M]: the definition kernels are held to."""
    held = (flat >= 0) & (flat < count)
    key = torch.where(held, flat, count)
    order = key.sort(stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=key.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key))[:count]
    stops = counts.cumsum(0)
    tiles = (counts + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    tile = torch.arange(num_tiles(len(flat), count, block_m), device=key.device)
    expert = torch.searchsorted(ends, tile, right=True)
    at = expert.clamp(max=count - 1)
    start = stops[at] - counts[at] + (tile - ends[at] + tiles[at]) * block_m
    place = torch.where(held, place, -1)
    return Tiles(order, place, expert.int(), start.int(), stops.int(), block_m)


def num_tiles(pairs: int, count: int, block_m: int) -> int:
    """Tiles that so many pairs of so many experts can need: each expert's last may not be full."""
    return min(count, pairs) + pairs // block_m


def plan_tiles_triton(flat: torch.Tensor, count: int, block_m: int) -> Tiles:
    """`plan_tiles` as two launches, a program an expert: counts, then places by those before.

    Of pairs that are not here `order` has nothing, of tiles that are not there `start` neither.
    """
    most, device = num_tiles(len(flat), count, block_m), flat.device
    order, place = torch.empty_like(flat), torch.empty_like(flat)
    counts, stops = torch.empty((2, count), dtype=torch.int32, device=device)
    expert, start = torch.empty((2, most), dtype=torch.int32, device=device)
    _count_kernel[(count,)](counts, flat, len(flat), BLOCK=_BLOCK, **dependent(flat))
    _plan_kernel[(count,)](
        order,
        place,
        expert,
        start,
        stops,
        flat,
        counts,
        len(flat),
        most,
        E=count,
        ROOM=triton.next_power_of_2(count),
        BLOCK_M=block_m,
        BLOCK=_BLOCK,
        **dependent(flat),
    )
    return Tiles(order, place, expert, start, stops, block_m)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    counts_ptr,  # [E] int32, out
    flat_ptr,  # [M] int64
    num_pairs,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    mine = tl.program_id(0)
    seen = tl.zeros([BLOCK], dtype=tl.int32)
    for first in tl.range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = tl.load(flat_ptr + at, mask=at < num_pairs, other=-1)
        seen += (key == mine).to(tl.int32)
    tl.store(counts_ptr + mine, tl.sum(seen))


@triton.jit(do_not_specialize=["num_pairs", "most"])
def _plan_kernel(
    order_ptr,  # [M] int64, out
    place_ptr,  # [M] int64, out
    expert_ptr,  # [B] int32, out
    start_ptr,  # [B] int32, out
    stops_ptr,  # [E] int32, out
    flat_ptr,  # [M] int64
    counts_ptr,  # [E] int32
    num_pairs,
    most,
    E: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    mine = tl.program_id(0)
    each = tl.arange(0, ROOM)
    counts = tl.load(counts_ptr + each, mask=each < E, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    base = tl.sum(tl.where(each < mine, counts, 0))
    count = tl.sum(tl.where(each == mine, counts, 0))
    tile = tl.sum(tl.where(each < mine, tiles, 0))
    tl.store(stops_ptr + mine, base + count)
    own = (count + BLOCK_M - 1) // BLOCK_M
    for first in tl.range(0, own, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(expert_ptr + tile + at, tl.zeros_like(at) + mine, mask=at < own)
        tl.store(start_ptr + tile + at, base + at * BLOCK_M, mask=at < own)
    if mine == E - 1:  # tiles that are not there
        for first in tl.range(tile + own, most, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(expert_ptr + at, tl.zeros_like(at) + E, mask=at < most)
    for first in tl.range(0, num_pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        live = at < num_pairs
        key = tl.load(flat_ptr + at, mask=live, other=-1)
        hit = ((key == mine) & live).to(tl.int32)
        to = base + tl.cumsum(hit, 0) - hit
        tl.store(order_ptr + to, at.to(tl.int64), mask=hit > 0)
        tl.store(place_ptr + at, to.to(tl.int64), mask=hit > 0)
        base += tl.sum(hit)
        if mine == 0:
            elsewhere = ((key < 0) | (key >= E)) & live
            tl.store(place_ptr + at, tl.full([BLOCK], -1, tl.int64), mask=elsewhere)


def grouped_product(
    x: torch.Tensor, plan: Tiles, weight: torch.Tensor | Laid, *, rows_from: int
) -> torch.Tensor:
    """Rows times their experts' matrices.

    Args:
        x: [T, K], a row a token, or [M, K], a row a pair as in `plan.order`.
        plan: Who goes where.
        weight: [E, N, K], as numbers or packed.
        rows_from: k where x has a row a token, 0 where it has one a pair.

    Returns:
        [M, N] in x's dtype, a row a pair as in `plan.order`; of pairs that are not here, anything.
    """
    if isinstance(weight, torch.Tensor):
        given, columns = (weight, weight.stride(0), weight, 0, 0), weight.shape[1]
        scale_n, block_k = 0, 0
    else:
        given, columns = packed_arguments(weight), weight.out_features
        scale_n, block_k = scale_rows(weight), scale_inputs(weight)
    out = torch.empty((len(plan.order), columns), dtype=x.dtype, device=x.device)
    tile = tile_of(plan.block_m)
    _grouped_kernel[(len(plan.expert), triton.cdiv(columns, tile.n))](
        out,
        x,
        *given,
        plan.order,
        plan.expert,
        plan.start,
        plan.stops,
        E=len(plan.stops),
        K=x.shape[1],
        N=columns,
        FROM=max(rows_from, 1),
        GATHER=rows_from > 0,
        PACKED=not isinstance(weight, torch.Tensor),
        BLOCK_K=block_k,
        SCALE_N=scale_n,
        ASM=runs_asm(x),
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def tile_of(block_m: int) -> Tile:
    """Of a grouped product, by its rows."""
    return {16: Tile(16, 128, 2, 3), 32: Tile(32, 128, 4, 3), 64: Tile(64, 128, 8, 3)}[block_m]


@triton.jit
def _grouped_kernel(
    out_ptr,  # [M, N], out
    x_ptr,  # [T, K] or [M, K]
    w_ptr,  # [E, N, K], or [E, N, K/2]
    w_expert,
    scale_ptr,  # PACKED only
    scale_expert,
    scale_row,
    order_ptr,  # [M] int64
    expert_ptr,  # [B] int32
    start_ptr,  # [B] int32
    stops_ptr,  # [E] int32
    E: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    FROM: tl.constexpr,
    GATHER: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALE_N: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < E:
        pair = (tl.load(start_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
        live = pair < tl.load(stops_ptr + expert)
        column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows and columns beyond the end read another's instead, and are not written
        row = tl.where(live, pair, 0)
        if GATHER:
            row = tl.load(order_ptr + row) // FROM
        some = tl.minimum(column, N - 1)
        x_at, w_at = x_ptr + row * K, w_ptr + expert * w_expert
        total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        if PACKED:
            total = packed_tile(
                total, x_at, w_at, scale_ptr + expert * scale_expert, scale_row, some, 0,
                K, K, BLOCK_K, SCALE_N, ASM,
            )  # fmt: skip
        else:
            for k in tl.range(0, K, 64):
                at = k + tl.arange(0, 64)
                live_k = at < K
                x = tl.load(x_at[None, :] + at[:, None], mask=live_k[:, None], other=0.0)
                w_here = w_at + some[:, None] * K + at[None, :]
                w = tl.load(w_here, mask=live_k[None, :], other=0.0)
                total = tl.dot(w, x, total, input_precision="ieee")
        at_out = pair[None, :] * N + column[:, None]
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_out, out, mask=live[None, :] & (column < N)[:, None])


def combine(out: torch.Tensor, plan: Tiles, weights: torch.Tensor) -> torch.Tensor:
    """Each token's weighted sum.

    Args:
        out: [M, H], a row a pair as in `plan.order`.
        plan: Where pairs are.
        weights: [T, k] float32.

    Returns:
        [T, H] in out's dtype.
    """
    (num_tokens, per_token), width = weights.shape, out.shape[1]
    total = torch.empty((num_tokens, width), dtype=out.dtype, device=out.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _combine_kernel[(num_tokens, triton.cdiv(width, block))](
        total,
        out,
        plan.place,
        weights.contiguous(),
        H=width,
        PER_TOKEN=per_token,
        BLOCK=block,
    )
    return total


@triton.jit
def _combine_kernel(
    total_ptr,  # [T, H], out
    out_ptr,  # [M, H]
    place_ptr,  # [M] int64
    weights_ptr,  # [T, k]
    H: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < H
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + j
        row = tl.load(place_ptr + pair)
        keep = live & (row + 0 * column >= 0)  # the interpreter wants a mask of one shape
        y = tl.load(out_ptr + row * H + column, mask=keep, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * y
    tl.store(total_ptr + token * H + column, total.to(total_ptr.dtype.element_ty), mask=live)
