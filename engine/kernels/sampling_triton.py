"""Argmax over the vocabulary, with temperature and noise where a row asks for it: two launches.

    score = logits                      temperature = 0
    score = logits / temperature + g    temperature > 0, g Gumbel: the argmax is a draw

The first launch splits each row over programs and leaves the best of each share; the second takes
the best of those. Ties go to the lowest id; a score that is not a number never wins, and a row
without any number gives an id in range all the same. Reads the logits once.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.noise_triton import gumbel_tile

_BLOCK = 2048
_PROGRAMS = 2112
"""Programs that fill the largest card a few times over."""


def shares(num_rows: int, vocab_size: int, block: int = _BLOCK) -> tuple[int, int]:
    """How many programs share a row, and how many tiles each takes; none is left without one."""
    tiles = -(-vocab_size // block)
    split = max(1, min(tiles, -(-_PROGRAMS // max(num_rows, 1))))
    each = -(-tiles // split)
    return -(-tiles // each), each


def block_for(vocab_size: int) -> int:
    """Tile width for a vocabulary."""
    return max(4, min(_BLOCK, 1 << (vocab_size - 1).bit_length()))


def best_ids_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    stream: int = 0,
    rounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Argmax or draw per row.

    Args:
        logits: [R, V]; the rows' stride is free.
        temperature: [R] float32; None = all 0, and nothing else is read.
        keys: [R] int64.
        positions: [R] int64.
        stream: Noise stream.
        rounds: [R] int64, fourth counter word; None = 0.

    Returns:
        [R] int64.
    """
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_rows, vocab_size = logits.shape
    block = block_for(vocab_size)
    split, each = shares(num_rows, vocab_size, block)
    device = logits.device
    values = torch.empty((num_rows, split), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, split), dtype=torch.int32, device=device)
    _best_kernel[(num_rows, split)](
        values,
        ids,
        logits,
        logits.stride(0),
        logits if temperature is None else temperature,
        logits if keys is None else keys,
        logits if positions is None else positions,
        logits if rounds is None else rounds,
        V=vocab_size,
        TILES=each,
        SAMPLED=temperature is not None,
        STREAM=stream,
        ROUNDS=rounds is not None,
        BLOCK=block,
    )
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    _pick_kernel[(num_rows,)](out, values, ids, SPLIT=split, BLOCK=triton.next_power_of_2(split))
    return out


@triton.jit
def best_of(best, best_tile, BLOCK: tl.constexpr):
    """Maximum of `best` [BLOCK] and the lowest id it stands at; best_tile [BLOCK] its tiles."""
    value = tl.max(best, axis=0)
    token = best_tile * BLOCK + tl.arange(0, BLOCK)
    return value, tl.min(tl.where(best == value, token, 0x7FFFFFFF), axis=0)


@triton.jit
def gumbel_row(key, first_quad, position, stream, rounds, QUADS: tl.constexpr):
    """[4 * QUADS] Gumbel noise of one row; every argument a scalar."""
    one = tl.zeros([1], tl.int64)
    noise = gumbel_tile(one + key, first_quad, one + position, stream, one + rounds, QUADS)
    return tl.reshape(noise, [4 * QUADS])


@triton.jit
def _best_kernel(
    values_ptr,  # [R, splits] float32, out
    ids_ptr,  # [R, splits] int32, out
    logits_ptr,  # [R, V]
    logits_stride,
    temperature_ptr,  # [R] float32; SAMPLED only, as are the next two
    keys_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    rounds_ptr,  # [R] int64; ROUNDS only
    V: tl.constexpr,
    TILES: tl.constexpr,  # tiles of this program
    SAMPLED: tl.constexpr,
    STREAM: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILES
    lane = tl.arange(0, BLOCK)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        scale = 1.0 / tl.where(temperature > 0, temperature, 1.0)
        key, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)
        rounds = tl.zeros([], tl.int64)
        if ROUNDS:
            rounds = tl.load(rounds_ptr + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32) + first
    for tile in range(first, tl.minimum(first + TILES, (V + BLOCK - 1) // BLOCK)):
        token = tile * BLOCK + lane
        at = logits_ptr + row * logits_stride + token
        score = tl.load(at, mask=token < V, other=float("-inf")).to(tl.float32)
        if SAMPLED:  # noqa: SIM102 - known when compiling
            if temperature > 0:
                quad = tile * (BLOCK // 4)
                noise = gumbel_row(key, quad, position, STREAM, rounds, BLOCK // 4)
                score = score * scale + noise
        better = score > best
        best = tl.where(better, score, best)
        best_tile = tl.where(better, tile, best_tile)
    value, token = best_of(best, best_tile, BLOCK)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values_ptr + at, value)
    tl.store(ids_ptr + at, token)


@triton.jit
def pick(values_ptr, ids_ptr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Value and lowest id of the best of SPLIT <= BLOCK shares."""
    share = tl.arange(0, BLOCK)
    value = tl.load(values_ptr + share, mask=share < SPLIT, other=float("-inf"))
    token = tl.load(ids_ptr + share, mask=share < SPLIT, other=0x7FFFFFFF)
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, token, 0x7FFFFFFF), axis=0)


@triton.jit
def _pick_kernel(
    out_ptr,  # [R] int64, out
    values_ptr,  # [R, SPLIT] float32
    ids_ptr,  # [R, SPLIT] int32
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, token = pick(values_ptr + row * SPLIT, ids_ptr + row * SPLIT, SPLIT, BLOCK)
    tl.store(out_ptr + row, token.to(tl.int64))
