"""The product that makes q, k and v, and what happens before attention, in one launch.

    qkv = x W^T + b;   rope_store(qkv)

It is a product of few rows (engine.kernels.few_rows), of which the program that ends last of a head
has the whole head: it adds the parts up, norms and rotates, and puts k and v into the cache. With
few requests a layer's small kernels take longer to start than to run, and this is one less.

The definition is `few_rows_ref` and then `rope_store_ref`; it rounds where they do.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.few_rows import (
    BLOCK_K,
    BLOCK_N,
    MOST_ROWS,
    FewRows,
    check_few,
    few_rows_ref,
    part_of_sum,
)
from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.linear import Linear
from engine.kernels.rope_store import rope_store, rope_store_ref, turned


class Turn(NamedTuple):
    """What happens to heads on their way. T tokens, K kv heads, D head dim."""

    q_weight: torch.Tensor | None  # [D] RMS norm of query heads, or None for no norm
    k_weight: torch.Tensor | None  # [D], of key heads
    eps: float  # of both norms
    cos_sin: torch.Tensor  # [T, 2, D/2] float32, rows of `rope_table`
    k_cache: torch.Tensor  # [slots, K, D], one layer, changed in place
    v_cache: torch.Tensor  # [slots, K, D], changed in place
    slots: torch.Tensor  # [T] int64; negative slots write nothing


def fits(head_dim: int) -> bool:
    """May heads be so long: whole tiles, in two halves that are powers of two?"""
    return head_dim in (BLOCK_N, 2 * BLOCK_N, 4 * BLOCK_N)


def rope_product(x: torch.Tensor, matrix: Linear, turn: Turn) -> torch.Tensor:
    """Query heads [T, Q, D] of `x` [T, in]; keys and values go to their slots, in place.

    Args:
        x: In the weight's dtype.
        matrix: [(Q + 2K) * D, in]: rows of query heads, key heads, value heads.
        turn: What happens to the heads; its caches are changed.
    """
    head_dim = turn.k_cache.shape[-1]
    if matrix.few is not None and matrix.takes_few(len(x)) and fits(head_dim):
        return rope_product_triton(x, matrix.weight, matrix.bias, matrix.few, turn)
    return rope_store(matrix(x).view(len(x), -1, head_dim), *turn)


def rope_product_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, turn: Turn
) -> torch.Tensor:
    """`rope_product_triton` in torch: the definition the kernel is held to."""
    qkv = few_rows_ref(x, weight, bias).view(len(x), -1, turn.k_cache.shape[-1])
    return rope_store_ref(qkv, *turn)


def rope_product_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: FewRows, turn: Turn
) -> torch.Tensor:
    """Multiply, norm, rotate, store.

    Args:
        x: [T, in], T up to 16, dtype as weight.
        weight: [(Q + 2K) * D, in]: rows of query heads, key heads, value heads, side by side.
        bias: [(Q + 2K) * D], or None.
        way: As `few_rows_of` or a test gives it; one call with it at a time.
        turn: What happens to the heads; its caches are changed.

    Returns:
        [T, Q, D] in x's dtype.

    Raises:
        ValueError: There are more rows, heads are no whole tiles, or `way` is of another matrix.
    """
    check_few(x, weight, way)
    _check(x, weight, bias, turn)
    k_cache, v_cache = turn.k_cache, turn.v_cache
    (rows, width), (kv_heads, head_dim) = x.shape, k_cache.shape[1:]
    heads = weight.shape[0] // head_dim
    out = torch.empty((rows, heads - 2 * kv_heads, head_dim), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tiles = weight.shape[0] // BLOCK_N
    shape = tiles, way.parts, BLOCK_N * MOST_ROWS
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    _rope_product_kernel[(tiles * way.parts,)](
        out,
        sums,
        way.counts,
        x.contiguous(),
        weight,
        out if bias is None else bias,
        out if turn.q_weight is None else turn.q_weight,
        out if turn.k_weight is None else turn.k_weight,
        turn.eps,
        turn.cos_sin.contiguous(),
        turn.slots.contiguous(),
        k_cache,
        v_cache,
        k_cache.stride(0),
        k_cache.stride(1),
        rows,
        IN=width,
        Q=heads - 2 * kv_heads,
        K=kv_heads,
        HALF=head_dim // 2,
        Q_NORM=turn.q_weight is not None,
        K_NORM=turn.k_weight is not None,
        BIAS=bias is not None,
        PARTS=way.parts,
        BLOCK_M=MOST_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=way.stages,
        num_warps=4,
        **dependent(x),
    )
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, turn: Turn) -> None:
    dims = Dims()
    dims.check("x", x, "T _")
    dims.check("weight", weight, "N _", x.dtype)
    if bias is not None:
        dims.check("bias", bias, "N", x.dtype)
    dims.check("k_cache", turn.k_cache, "P K D", x.dtype)
    dims.check("v_cache", turn.v_cache, "P K D", x.dtype)
    for name, norm in (("q_weight", turn.q_weight), ("k_weight", turn.k_weight)):
        if norm is not None:
            dims.check(name, norm, "D", x.dtype)
    dims.check("cos_sin", turn.cos_sin, "T 2 _", torch.float32)
    dims.check("slots", turn.slots, "T", torch.int64)
    head_dim, k_stride, v_stride = dims["D"], turn.k_cache.stride(), turn.v_cache.stride()
    if k_stride != v_stride or k_stride[-1] != 1:
        raise ValueError(f"strides: caches {k_stride}, {v_stride}")
    if not fits(head_dim) or len(weight) % head_dim:
        raise ValueError(f"weight: {len(weight)} outputs are no heads of {head_dim}")
    if 2 * turn.cos_sin.shape[-1] != head_dim:
        raise ValueError(f"cos_sin: {turn.cos_sin.shape[-1]} angles, heads are {head_dim} long")


@triton.jit(do_not_specialize=["num_rows"])
def _rope_product_kernel(
    out_ptr,  # [T, Q, 2*HALF], out
    sums_ptr,  # [tiles, PARTS, BLOCK_N, BLOCK_M] float32, between programs
    count_ptr,  # [tiles] int32, zeros before and after; one a head is used
    x_ptr,  # [T, IN]
    w_ptr,  # [(Q + 2K) * 2*HALF, IN]
    bias_ptr,  # [(Q + 2K) * 2*HALF]; BIAS only
    q_weight_ptr,  # [2*HALF]; Q_NORM only
    k_weight_ptr,  # [2*HALF]; K_NORM only
    eps,
    cos_sin_ptr,  # [T, 2, HALF] float32
    slots_ptr,  # [T] int64
    k_cache_ptr,  # [P, K, 2*HALF], out
    v_cache_ptr,  # [P, K, 2*HALF], out
    cache_slot,
    cache_head,
    num_rows,
    IN: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid [tiles * PARTS]."""
    TILES: tl.constexpr = 2 * HALF // BLOCK_N  # of a head
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    head = tile // TILES
    row = tl.arange(0, BLOCK_M)
    at = tl.arange(0, HALF)
    live = (row < num_rows)[None, :]
    turns = live & (tl.zeros((HALF,), tl.int32) + head < Q + K)[:, None]
    # what a head's end needs is there before the inputs are; on demand it would be one more wait
    angle = cos_sin_ptr + row.to(tl.int64)[None, :] * (2 * HALF) + at[:, None]
    cos = tl.load(angle, mask=turns, other=0.0)
    sin = tl.load(angle + HALF, mask=turns, other=0.0)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    low, high = _norm_weights(q_weight_ptr, k_weight_ptr, head, Q, K, HALF, Q_NORM, K_NORM)
    wait_for_inputs(DEPENDENT)
    lane = tl.arange(0, BLOCK_N)
    column = tile.to(tl.int64) * BLOCK_N + lane
    total = part_of_sum(
        x_ptr, w_ptr, column, row, num_rows, part, IN, PARTS, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
    )  # fmt: skip
    mine = lane[:, None] * BLOCK_M + row[None, :]
    tl.store(sums_ptr + (tile.to(tl.int64) * PARTS + part) * (BLOCK_N * BLOCK_M) + mine, total)
    tl.debug_barrier()  # one thread tells for all of the program
    done = tl.atomic_add(count_ptr + head, 1, sem="acq_rel", scope="gpu")
    if done == TILES * PARTS - 1:
        tl.store(count_ptr + head, 0)
        d = head * (2 * HALF) + at
        # a token's two halves of the head, [HALF, BLOCK_M]
        a = _column_sums(sums_ptr, d, row, PARTS, BLOCK_M, BLOCK_N)
        b = _column_sums(sums_ptr, d + HALF, row, PARTS, BLOCK_M, BLOCK_N)
        if BIAS:
            a += tl.load(bias_ptr + d).to(tl.float32)[:, None]
            b += tl.load(bias_ptr + d + HALF).to(tl.float32)[:, None]
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        raw_a, raw_b = a.to(dtype), b.to(dtype)
        a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / (2 * HALF) + eps)
        scale = scale[None, :]
        kept = (slot >= 0)[None, :]
        if head < Q:
            q_a, q_b = turned(a, b, scale, low, high, cos, sin, dtype, Q_NORM)
            to = (row.to(tl.int64)[None, :] * Q + head) * (2 * HALF) + at[:, None]
            tl.store(out_ptr + to, q_a, mask=live)
            tl.store(out_ptr + to + HALF, q_b, mask=live)
        elif head < Q + K:
            k_a, k_b = turned(a, b, scale, low, high, cos, sin, dtype, K_NORM)
            to = slot[None, :] * cache_slot + (head - Q) * cache_head + at[:, None]
            tl.store(k_cache_ptr + to, k_a, mask=kept)
            tl.store(k_cache_ptr + to + HALF, k_b, mask=kept)
        else:
            to = slot[None, :] * cache_slot + (head - Q - K) * cache_head + at[:, None]
            tl.store(v_cache_ptr + to, raw_a, mask=kept)
            tl.store(v_cache_ptr + to + HALF, raw_b, mask=kept)


@triton.jit
def _column_sums(
    sums_ptr,
    column,  # [N]: outputs
    row,  # [BLOCK_M]
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[N, BLOCK_M]: the parts of these outputs, added up in their order."""
    tile = (column // BLOCK_N).to(tl.int64) * (PARTS * BLOCK_N * BLOCK_M)
    at = sums_ptr + (tile + column % BLOCK_N * BLOCK_M)[:, None] + row[None, :]
    total = tl.load(at, cache_modifier=".cg")
    for p in tl.static_range(1, PARTS):
        total += tl.load(at + p * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    return total


@triton.jit
def _norm_weights(
    q_weight_ptr,
    k_weight_ptr,
    head,
    Q: tl.constexpr,
    K: tl.constexpr,
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    """Halves [HALF, 1] of the weight of a head's norm, if it has one."""
    at = tl.arange(0, HALF)
    heads = tl.zeros((HALF,), tl.int32) + head
    low = tl.zeros((HALF,), tl.float32)
    high = low
    if Q_NORM:
        is_q = heads < Q
        low += tl.load(q_weight_ptr + at, mask=is_q, other=0.0).to(tl.float32)
        high += tl.load(q_weight_ptr + HALF + at, mask=is_q, other=0.0).to(tl.float32)
    if K_NORM:
        is_k = (heads >= Q) & (heads < Q + K)
        low += tl.load(k_weight_ptr + at, mask=is_k, other=0.0).to(tl.float32)
        high += tl.load(k_weight_ptr + HALF + at, mask=is_k, other=0.0).to(tl.float32)
    return low[:, None], high[:, None]
