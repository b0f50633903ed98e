"""Kernels of a mixture's experts: a plan of tiles, products by expert, weighted sums by token."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.packed import Packed
from engine.kernels.packed_linear import packed_arguments, packed_tile

_BLOCK = 1024
_PLAIN_COLUMNS = 64


class Tiles(NamedTuple):
    """Pairs of token and expert by expert. M pairs, E experts, B tiles of at most BLOCK_M pairs."""

    order: torch.Tensor  # [M] int64, pairs by expert; those of other ranks last
    place: torch.Tensor  # [M] int64, where each pair is in `order`; -1: its expert is not here
    expert: torch.Tensor  # [B] int32, of each tile; E where there is no tile
    start: torch.Tensor  # [B] int32, its first pair in `order`
    stops: torch.Tensor  # [E] int32, where each expert's pairs end
    block_m: int


def plan_tiles(experts: torch.Tensor, count: int) -> Tiles:
    """Sort pairs by expert and cut them into tiles; shapes follow from T, k and E alone.

    Args:
        experts: [T, k] int64, numbers of this rank's experts; others are below 0 or above.
        count: E.
    """
    flat = experts.flatten()
    held = (flat >= 0) & (flat < count)
    key = torch.where(held, flat, count)
    order = key.sort(stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(count + 1, dtype=torch.int64, device=key.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key))[:count]
    stops = counts.cumsum(0)
    block_m = 16 if len(flat) <= 32 * count else 64
    tiles = (counts + block_m - 1) // block_m
    ends = tiles.cumsum(0)
    most = min(count, len(flat)) + len(flat) // block_m
    tile = torch.arange(most, device=key.device)
    expert = torch.searchsorted(ends, tile, right=True)
    at = expert.clamp(max=count - 1)
    start = stops[at] - counts[at] + (tile - ends[at] + tiles[at]) * block_m
    place = torch.where(held, place, -1)
    return Tiles(order, place, expert.int(), start.int(), stops.int(), block_m)


def grouped_product(
    x: torch.Tensor, plan: Tiles, weight: torch.Tensor | Packed, *, rows_from: int
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
    packed = isinstance(weight, Packed)
    whole = weight.weight.view(torch.uint8) if isinstance(weight, Packed) else weight
    width, count, columns = x.shape[1], whole.shape[0], whole.shape[1]
    out = torch.empty((len(plan.order), columns), dtype=x.dtype, device=x.device)
    block_n = 64 if plan.block_m == 16 else 128
    scale = weight.scale if isinstance(weight, Packed) else whole
    how: dict[str, object] = {"FP4": False, "POWERS": False, "GROUP": 1, "SCALE_N": 1}
    how["BLOCK_K"] = min(_PLAIN_COLUMNS, max(16, triton.next_power_of_2(width)))
    if isinstance(weight, Packed):
        how = packed_arguments(weight, width)
    _grouped_kernel[(len(plan.expert), triton.cdiv(columns, block_n))](
        out,
        x,
        whole,
        whole.stride(0),
        scale,
        scale.stride(0),
        scale.stride(1),
        plan.order,
        plan.expert,
        plan.start,
        plan.stops,
        E=count,
        K=width,
        N=columns,
        FROM=max(rows_from, 1),
        GATHER=rows_from > 0,
        PACKED=packed,
        **how,
        BLOCK_M=plan.block_m,
        BLOCK_N=block_n,
        num_warps=8 if how["FP4"] and plan.block_m > 16 else 4,
        num_stages=3,
    )
    return out


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
    FP4: tl.constexpr,
    POWERS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < E:
        pair = (tl.load(start_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
        x_live = pair < tl.load(stops_ptr + expert)
        column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_live = column < N
        row = pair
        if GATHER:
            row = tl.load(order_ptr + pair, mask=x_live, other=0) // FROM
        at_x, at_w = x_ptr + row * K, w_ptr + expert * w_expert
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            if PACKED:
                total = packed_tile(
                    total, at_x, x_live, at_w, scale_ptr + expert * scale_expert, scale_row,
                    column, n_live, k, K, FP4, POWERS, GROUP, BLOCK_K, SCALE_N,
                )  # fmt: skip
            else:
                at = k + tl.arange(0, BLOCK_K)
                live = at < K
                keep = x_live[:, None] & live[None, :]
                x = tl.load(at_x[:, None] + at[None, :], mask=keep, other=0.0)
                keep = n_live[:, None] & live[None, :]
                w = tl.load(at_w + column[:, None] * K + at[None, :], mask=keep, other=0.0)
                total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
        at_out = pair[:, None] * N + column[None, :]
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_out, out, mask=x_live[:, None] & n_live[None, :])


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
