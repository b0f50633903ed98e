"""The Markov chain on a GPU: two launches a position, W2 read once a position.

    next   reduce the shares of the position before to its token, map it, look up e = W1[prev]
    step   logits = base_k + W2 f over tiles of the vocabulary for all rows; a running best per row,
           logits / temperature + noise where the row is sampled

W2 f is summed in float32 and never rounded before the choice of a greedy row; a sampled row draws
from its logits as they are kept, rounded to base's dtype, since the drafts are judged by those.
A position moves W2 once, Vd base logits a row, and as much again where logits are kept.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, multiprocessors, wait_for_inputs
from engine.kernels.noise_triton import gumbel_tile


class Draws(NamedTuple):
    """What sampled rows need."""

    temperature: torch.Tensor  # [R] float32
    keys: torch.Tensor  # [R] int64
    positions: torch.Tensor  # [R] int64, the anchors'
    logits: torch.Tensor  # [R, G, Vd] in base's dtype, out
    stream: int


class Tiles(NamedTuple):
    """How the step's launch cuts its work."""

    rows: int  # a program
    vocab: int  # a tile
    rank: int  # a product
    programs: int  # along the vocabulary
    num_warps: int
    num_stages: int


def choose_tiles(
    num_rows: int, vocab_size: int, rank: int, weight: torch.Tensor, *, sampled: bool
) -> Tiles:
    """Tiles that keep W2 streaming; with noise, small ones, which leave registers for it."""
    padded = max(16, triton.next_power_of_2(rank))
    rows = min(64 if sampled else 128, max(16, triton.next_power_of_2(num_rows)))
    if weight.dtype == torch.float32:
        # float32 products have no matrix unit: small ones, added up
        rows, vocab, step = min(rows, 32), 64, 32
    else:
        vocab, step = max(32, min(128, 16384 // padded)), padded
    vocab = min(32 if sampled else vocab, max(16, triton.next_power_of_2(vocab_size)))
    # programs a processor holds beside each other, by the shared memory and registers they take
    beside = 4 if rows <= 16 else 2 if rows <= 64 else 1
    programs = max(1, _num_processors(weight.device) * beside // triton.cdiv(num_rows, rows))
    return Tiles(
        rows,
        vocab,
        min(step, padded),
        min(programs, triton.cdiv(vocab_size, vocab)),
        num_warps=4 if sampled or rows <= 32 else 8,
        num_stages=3 if sampled or rows > 64 else 2,
    )


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: enough that shares must be merged
    return multiprocessors(device)


class MarkovChain:
    """One chain under way: buffers of R rows, G positions; `next` and `step` take turns."""

    def __init__(
        self,
        base_logits: torch.Tensor,
        anchors: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        draft_to_target: torch.Tensor | None,
        draws: Draws | None,
        tiles: Tiles | None = None,
    ) -> None:
        """Allocate.

        Args:
            base_logits: [R, G, Vd].
            anchors: [R] int64.
            w1: [V, r].
            w2: [Vd, r].
            draft_to_target: [Vd] int64; None = identity.
            draws: None promises that every row is greedy.
            tiles: None = chosen by size.
        """
        self.base = base_logits if base_logits.stride(-1) == 1 else base_logits.contiguous()
        self.w1 = w1 if w1.stride(-1) == 1 else w1.contiguous()
        self.w2 = w2 if w2.stride(-1) == 1 else w2.contiguous()
        self.anchors, self.draft_to_target, self.draws = anchors, draft_to_target, draws
        num_rows, gamma, vocab_size = base_logits.shape
        rank, device = w1.shape[1], base_logits.device
        self.tiles = tiles or choose_tiles(
            num_rows, vocab_size, rank, w2, sampled=draws is not None
        )
        self.token_ids = torch.empty((num_rows, gamma), dtype=torch.int64, device=device)
        self.prev_embeds = torch.empty((num_rows, gamma, rank), dtype=w1.dtype, device=device)
        shape = (num_rows, self.tiles.programs)
        self._values = torch.empty(shape, dtype=torch.float32, device=device)
        self._ids = torch.empty(shape, dtype=torch.int32, device=device)

    def next(self, k: int) -> torch.Tensor:
        """Finish position k-1 if there is one; return [R, r], W1 of position k's predecessor."""
        num_rows, gamma, _ = self.base.shape
        rank, programs = self.w1.shape[1], self.tiles.programs
        mapped = self.draft_to_target is not None
        _next_kernel[(num_rows,)](
            self.token_ids,
            self.prev_embeds,
            self._values,
            self._ids,
            self.anchors,
            self.draft_to_target if mapped else self.anchors,
            self.w1,
            self.w1.stride(0),
            k,
            G=gamma,
            RANK=rank,
            MAPPED=mapped,
            PROGRAMS=programs,
            BLOCK=triton.next_power_of_2(programs),
            BLOCK_RANK=triton.next_power_of_2(rank),
            **dependent(self.w1),
        )
        return self.prev_embeds[:, min(k, gamma - 1)]

    def step(self, k: int, features: torch.Tensor) -> None:
        """Logits of position k and the best of each share; features [R, r] = f."""
        base, draws, tiles = self.base[:, k], self.draws, self.tiles
        num_rows, vocab_size = base.shape
        rank = self.w2.shape[1]
        kept = base if draws is None else draws.logits[:, k]
        _step_kernel[(triton.cdiv(num_rows, tiles.rows), tiles.programs)](
            self._values,
            self._ids,
            kept,
            kept.stride(0),
            base,
            base.stride(0),
            features,
            features.stride(0),
            self.w2,
            self.w2.stride(0),
            base if draws is None else draws.temperature,
            base if draws is None else draws.keys,
            base if draws is None else draws.positions,
            num_rows,
            k,
            V=vocab_size,
            RANK=rank,
            SAMPLED=draws is not None,
            STREAM=0 if draws is None else draws.stream,
            ROWS=tiles.rows,
            TILE=tiles.vocab,
            BLOCK_RANK=max(tiles.rank, triton.next_power_of_2(rank)),
            STEP_RANK=tiles.rank,
            **dependent(base),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


@triton.jit(do_not_specialize=["k"])
def _next_kernel(
    token_ids_ptr,  # [R, G] int64, out: column k-1
    prev_embeds_ptr,  # [R, G, RANK], out: position k
    values_ptr,  # [R, PROGRAMS] float32
    ids_ptr,  # [R, PROGRAMS] int32
    anchors_ptr,  # [R] int64
    draft_to_target_ptr,  # [Vd] int64; MAPPED only
    w1_ptr,  # [V, RANK]
    w1_stride,
    k,
    G: tl.constexpr,
    RANK: tl.constexpr,
    MAPPED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    prev = tl.load(anchors_ptr + row)
    if k > 0:
        share = tl.arange(0, BLOCK)
        at = row * PROGRAMS + share
        value = tl.load(values_ptr + at, mask=share < PROGRAMS, other=float("-inf"))
        token = tl.load(ids_ptr + at, mask=share < PROGRAMS, other=0x7FFFFFFF)
        best = tl.max(value, axis=0)
        prev = tl.min(tl.where(value == best, token, 0x7FFFFFFF), axis=0).to(tl.int64)
        if MAPPED:
            prev = tl.load(draft_to_target_ptr + prev)
        tl.store(token_ids_ptr + row * G + k - 1, prev)
    if k < G:
        rank = tl.arange(0, BLOCK_RANK)
        embed = tl.load(w1_ptr + prev * w1_stride + rank, mask=rank < RANK, other=0.0)
        tl.store(prev_embeds_ptr + (row * G + k) * RANK + rank, embed, mask=rank < RANK)


@triton.jit(do_not_specialize=["k", "num_rows"])
def _step_kernel(
    values_ptr,  # [R, programs] float32, out
    ids_ptr,  # [R, programs] int32, out
    kept_ptr,  # [R, V], out; SAMPLED only
    kept_stride,
    base_ptr,  # [R, V], of position k
    base_stride,
    features_ptr,  # [R, RANK]
    features_stride,
    w2_ptr,  # [V, RANK]
    w2_stride,
    temperature_ptr,  # [R] float32; SAMPLED only, as are the next two
    keys_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    num_rows,
    k,
    V: tl.constexpr,
    RANK: tl.constexpr,
    SAMPLED: tl.constexpr,
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    STEP_RANK: tl.constexpr,  # = BLOCK_RANK: one product; less: summed
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # neighbours in launch order share a tile of W2 in the cache
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first, programs = tl.program_id(1), tl.num_programs(1)
    lane, rank = tl.arange(0, TILE), tl.arange(0, BLOCK_RANK)
    live = row < num_rows
    wide_row = row.to(tl.int64)
    features_row = features_ptr + wide_row * features_stride
    if STEP_RANK == BLOCK_RANK:
        known = live[:, None] & (rank < RANK)[None, :]
        features = tl.load(features_row[:, None] + rank[None, :], mask=known, other=0.0)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + row, mask=live, other=0.0)
        key = tl.load(keys_ptr + row, mask=live, other=0)
        position = tl.load(positions_ptr + row, mask=live, other=0)
        hot = (temperature > 0)[:, None]
        scale = (1.0 / tl.where(temperature > 0, temperature, 1.0))[:, None]
    base_row = base_ptr + wide_row[:, None] * base_stride
    best = tl.full([ROWS, TILE], float("-inf"), tl.float32)
    best_tile = tl.zeros([ROWS, TILE], tl.int32) + first
    token = first * TILE + lane
    base = tl.load(
        base_row + token[None, :], mask=live[:, None] & (token < V)[None, :], other=float("-inf")
    )
    for tile in range(first, (V + TILE - 1) // TILE, programs):
        token = tile * TILE + lane
        inside = token < V
        w2_row = w2_ptr + token.to(tl.int64) * w2_stride
        if STEP_RANK == BLOCK_RANK:
            mask = inside[:, None] & (rank < RANK)[None, :]
            w2 = tl.load(w2_row[:, None] + rank[None, :], mask=mask, other=0.0)
            bias = tl.dot(features, tl.trans(w2), input_precision="ieee")
        else:
            bias = tl.zeros([ROWS, TILE], tl.float32)
            for start in range(0, BLOCK_RANK, STEP_RANK):
                part = start + tl.arange(0, STEP_RANK)
                known = live[:, None] & (part < RANK)[None, :]
                f = tl.load(features_row[:, None] + part[None, :], mask=known, other=0.0)
                mask = inside[:, None] & (part < RANK)[None, :]
                w2 = tl.load(w2_row[:, None] + part[None, :], mask=mask, other=0.0)
                bias += tl.dot(f, tl.trans(w2), input_precision="ieee")
        score = base.to(tl.float32) + bias
        # the next tile's base is on its way while this one is worked on
        ahead = (tile + programs) * TILE + lane
        base = tl.load(
            base_row + ahead[None, :],
            mask=live[:, None] & (ahead < V)[None, :],
            other=float("-inf"),
        )
        if SAMPLED:
            kept = score.to(kept_ptr.dtype.element_ty)
            at = kept_ptr + wide_row[:, None] * kept_stride + token[None, :]
            tl.store(at, kept, mask=live[:, None] & inside[None, :])
            quad = tile * (TILE // 4)
            noise = gumbel_tile(key, quad, position + 1 + k, STREAM, position, TILE // 4)
            score = tl.where(hot, kept.to(tl.float32) * scale + noise, score)
        better = score > best
        best = tl.where(better, score, best)
        best_tile = tl.where(better, tile, best_tile)
    value = tl.max(best, axis=1)
    token_id = best_tile * TILE + lane[None, :]
    token_id = tl.min(tl.where(best == value[:, None], token_id, 0x7FFFFFFF), axis=1)
    at = wide_row * programs + first
    tl.store(values_ptr + at, value, mask=live)
    tl.store(ids_ptr + at, token_id, mask=live)
