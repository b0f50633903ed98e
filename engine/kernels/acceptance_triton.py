"""Acceptance on a GPU: five launches, or two when every request is greedy; nothing waits.

    stats   per logits row and share of the vocabulary: argmax (greedy), or maximum and sum of
            softmax(logits / temperature); for the target's rows and for the drafts'
    walk    per request: greedy match, or u * draft_probs(d) < target_probs(d); accepted count
    bonus   per sampled request and share: argmax of log weights + Gumbel noise
    commit  per sampled request: the best of the shares

Probabilities are never stored. Reads each logits row once, and two rows a request once more.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.acceptance_stats import draft_stats, log2_scale, merge, target_stats
from engine.kernels.noise_triton import fast_log, uniform_at
from engine.kernels.sampling_triton import best_of, block_for, gumbel_row, pick, shares


def accept_greedy_triton(
    target_logits: torch.Tensor, cu_seqlens_q: torch.Tensor, draft_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids [R, G+1], number committed [R], finite [R] of greedy requests; as `accept`."""
    stats = target_stats(target_logits, cu_seqlens_q, None)
    return _walk(target_logits, cu_seqlens_q, draft_ids, stats, None)[:3]


def accept_sampled_triton(
    target_logits: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    target_temperature: torch.Tensor,
    draft_temperature: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    streams: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy and sampled requests together.

    Args:
        target_logits: [T, V].
        cu_seqlens_q: [R+1] int32.
        draft_ids: [R, G] int64.
        draft_logits: [R, G, V].
        target_temperature: [R] float32, 0 for greedy requests; where filters made scores of the
            logits, 1.
        draft_temperature: [R] float32.
        keys: [R] int64.
        positions: [R] int64.
        streams: ACCEPT and BONUS.

    Returns:
        Token ids [R, G+1], number committed [R], finite [R]; as `accept`.
    """
    if draft_logits.stride(-1) != 1:
        draft_logits = draft_logits.contiguous()
    target = target_stats(target_logits, cu_seqlens_q, target_temperature)
    draft = draft_stats(draft_logits, cu_seqlens_q, draft_temperature)
    sampling = (draft, draft_logits, target_temperature, draft_temperature, keys, positions)
    token_ids, committed, finite, state = _walk(
        target_logits, cu_seqlens_q, draft_ids, target, sampling, streams[0]
    )
    num_reqs, vocab_size = len(keys), target_logits.shape[1]
    block = block_for(vocab_size)
    split, each = shares(num_reqs, vocab_size, block)
    values = torch.empty((num_reqs, 2, split), dtype=torch.float32, device=keys.device)
    ids = torch.empty((num_reqs, 2, split), dtype=torch.int32, device=keys.device)
    _bonus_kernel[(num_reqs, split)](
        values,
        ids,
        target_logits,
        target_logits.stride(0),
        draft_logits,
        draft_logits.stride(0),
        draft_logits.stride(1),
        cu_seqlens_q,
        committed,
        state,
        target_temperature,
        draft_temperature,
        keys,
        positions,
        V=vocab_size,
        TILES=each,
        STREAM=streams[1],
        BLOCK=block,
    )
    _commit_kernel[(num_reqs,)](
        token_ids,
        values,
        ids,
        committed,
        state,
        target_temperature,
        WIDTH=token_ids.shape[1],
        SPLIT=split,
        BLOCK=triton.next_power_of_2(split),
    )
    return token_ids, committed, finite


def _walk(
    target_logits: torch.Tensor,
    cu: torch.Tensor,
    draft_ids: torch.Tensor,
    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sampling: tuple[object, ...] | None,
    stream: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids (without the bonus of sampled requests), committed, finite, and state [R, 4]."""
    num_reqs, gamma = draft_ids.shape
    device = draft_ids.device
    if draft_ids.stride(1) != 1:
        draft_ids = draft_ids.contiguous()
    token_ids = torch.empty((num_reqs, gamma + 1), dtype=torch.int64, device=device)
    committed = torch.empty(num_reqs, dtype=torch.int64, device=device)
    finite = torch.empty(num_reqs, dtype=torch.bool, device=device)
    state = torch.empty((num_reqs, 4), dtype=torch.float32, device=device)
    # a greedy walk reads none of the rest
    unused = (target, target_logits, state, state, committed, committed)
    draft, draft_logits, hot, draft_hot, keys, positions = sampling or unused
    assert isinstance(draft, tuple)
    assert isinstance(draft_logits, torch.Tensor)
    split, draft_split = target[0].shape[1], draft[0].shape[1]
    _walk_kernel[(num_reqs,)](
        token_ids,
        committed,
        finite,
        state,
        *target,
        target_logits,
        target_logits.stride(0),
        draft_ids,
        draft_ids.stride(0),
        draft[0],
        draft[2],
        draft_logits,
        draft_logits.stride(0),
        draft_logits.stride(1) if sampling else 0,
        cu,
        hot,
        draft_hot,
        keys,
        positions,
        G=gamma,
        SAMPLED=sampling is not None,
        STREAM=stream,
        BLOCK_G=max(2, triton.next_power_of_2(gamma + 1)),
        SPLIT=split,
        BLOCK=triton.next_power_of_2(split),
        DRAFT_SPLIT=draft_split,
        DRAFT_BLOCK=triton.next_power_of_2(draft_split),
    )
    return token_ids, committed, finite, state


@triton.jit
def _walk_kernel(
    token_ids_ptr,  # [R, G+1] int64, out
    committed_ptr,  # [R] int64, out
    finite_ptr,  # [R] bool, out
    state_ptr,  # [R, 4] float32, out: max and sum of the target and of the draft where the round
    # ends; the draft's sum is 0 if there is no draft, -1 if nothing is to be drawn
    max_ptr,  # [T, SPLIT] float32
    id_ptr,  # [T, SPLIT] int32
    sum_ptr,  # [T, SPLIT] float32
    target_ptr,  # [T, V] logits
    target_stride,
    draft_ids_ptr,  # [R, G] int64
    draft_ids_stride,
    draft_max_ptr,  # [R * G, DRAFT_SPLIT] float32; SAMPLED only, as is all that follows but cu
    draft_sum_ptr,  # [R * G, DRAFT_SPLIT] float32
    draft_ptr,  # [R, G, V] logits
    draft_req,
    draft_draft,
    cu_ptr,  # [R+1] int32
    temperature_ptr,  # [R] float32, of the target's logits
    draft_temperature_ptr,  # [R] float32
    keys_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    G: tl.constexpr,
    SAMPLED: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_G: tl.constexpr,  # >= G + 1
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT_SPLIT: tl.constexpr,
    DRAFT_BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_ptr + req).to(tl.int64)
    num = tl.load(cu_ptr + req + 1) - begin
    column = tl.arange(0, BLOCK_G)
    live = column < num
    decided = column < tl.minimum(num, G)
    row = begin + column
    part, biggest, total = merge(max_ptr, sum_ptr, row, live, SPLIT, BLOCK)
    share = tl.arange(0, BLOCK)
    mask = live[:, None] & (share < SPLIT)[None, :]
    ids = tl.load(id_ptr + row[:, None] * SPLIT + share[None, :], mask=mask, other=0x7FFFFFFF)
    chosen = tl.min(tl.where(part == biggest[:, None], ids, 0x7FFFFFFF), axis=1).to(tl.int64)
    # a NaN fails both comparisons
    good = (tl.abs(biggest) < float("inf")) & (total > 0.0)
    num_bad = tl.sum(tl.where(good | (column >= num), 0, 1), axis=0)
    tl.store(finite_ptr + req, num_bad == 0)
    ids_row = draft_ids_ptr + req * draft_ids_stride
    draft_id = tl.load(ids_row + column, mask=column < G, other=-1)
    ok = draft_id == chosen
    if SAMPLED:
        temperature = tl.load(temperature_ptr + req)
        if temperature > 0:
            _, draft_max, draft_sum = merge(
                draft_max_ptr,
                draft_sum_ptr,
                req * G + column,
                decided,
                DRAFT_SPLIT,
                DRAFT_BLOCK,
            )
            x_ptr = target_ptr + row * target_stride + draft_id
            x = tl.load(x_ptr, mask=decided, other=0.0).to(tl.float32) * log2_scale(temperature)
            p_target = tl.exp2(x - tl.where(decided, biggest, x)) / tl.where(decided, total, 1.0)
            y_ptr = draft_ptr + req * draft_req + column.to(tl.int64) * draft_draft + draft_id
            y = tl.load(y_ptr, mask=decided, other=0.0).to(tl.float32)
            y = y * log2_scale(tl.load(draft_temperature_ptr + req))
            p_draft = tl.exp2(y - tl.where(decided, draft_max, y))
            p_draft /= tl.where(decided, draft_sum, 1.0)
            zero = tl.zeros([BLOCK_G], tl.int64)
            position = tl.load(positions_ptr + req) + 1 + column
            u = uniform_at(zero + tl.load(keys_ptr + req), position, STREAM, zero)
            # multiply, never divide: a draft of probability 0 cannot have been drawn
            ok = u * p_draft < p_target
            stay = tl.min(tl.where(ok & decided, BLOCK_G, column), axis=0)
            last = column == stay
            state = state_ptr + req * 4
            tl.store(state, tl.sum(tl.where(last, biggest, 0.0), axis=0))
            tl.store(state + 1, tl.sum(tl.where(last, total, 0.0), axis=0))
            tl.store(state + 2, tl.sum(tl.where(last & decided, draft_max, 0.0), axis=0))
            drawn = tl.sum(tl.where(last & decided, draft_sum, 0.0), axis=0)
            tl.store(state + 3, tl.where(stay < num, drawn, -1.0))
    accepted = tl.min(tl.where(ok & decided, BLOCK_G, column), axis=0)
    committed = tl.where(num > 0, tl.minimum(accepted + 1, num), 0)
    if SAMPLED:  # the bonus comes later
        chosen = tl.where(temperature > 0, -1, chosen)
    token = tl.where(column == accepted, chosen, draft_id)
    token = tl.where(column < committed, token, -1)
    tl.store(token_ids_ptr + req * (G + 1) + column, token, mask=column < G + 1)
    tl.store(committed_ptr + req, committed.to(tl.int64))


@triton.jit
def _bonus_kernel(
    values_ptr,  # [R, 2, splits] float32, out: best score of the residual, and of the target
    ids_ptr,  # [R, 2, splits] int32, out
    target_ptr,  # [T, V] logits
    target_stride,
    draft_ptr,  # [R, G, V] logits
    draft_req,
    draft_draft,
    cu_ptr,  # [R+1] int32
    committed_ptr,  # [R] int64
    state_ptr,  # [R, 4] float32
    temperature_ptr,  # [R] float32, of the target's logits
    draft_temperature_ptr,  # [R] float32
    keys_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    V: tl.constexpr,
    TILES: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + req)
    committed = tl.load(committed_ptr + req)
    if temperature <= 0:
        return
    if committed == 0:
        return
    accepted = committed - 1
    begin = tl.load(cu_ptr + req).to(tl.int64)
    state = state_ptr + req * 4
    draft_sum = tl.load(state + 3)
    if draft_sum < 0:
        return
    rejected = draft_sum > 0
    target_max, target_part = tl.load(state), 1.0 / tl.load(state + 1)
    draft_max, draft_part = tl.load(state + 2), 1.0
    scale, draft_scale = log2_scale(temperature), 1.0
    if rejected:
        draft_part = 1.0 / draft_sum
        draft_scale = log2_scale(tl.load(draft_temperature_ptr + req))
    key, position = tl.load(keys_ptr + req), tl.load(positions_ptr + req) + committed
    target_row = target_ptr + (begin + accepted) * target_stride
    draft_row = draft_ptr + req * draft_req + accepted * draft_draft
    first = tl.program_id(1) * TILES
    none = tl.full([BLOCK], float("-inf"), tl.float32)
    best, best_tile = none, tl.zeros([BLOCK], tl.int32) + first
    plain, plain_tile = none, tl.zeros([BLOCK], tl.int32) + first
    for tile in range(first, tl.minimum(first + TILES, (V + BLOCK - 1) // BLOCK)):
        token = tile * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(target_row + token, mask=token < V, other=float("-inf")).to(tl.float32)
        zero = tl.zeros([], tl.int64)
        noise = gumbel_row(key, tile * (BLOCK // 4), position, STREAM, zero, BLOCK // 4)
        score = x * (1.0 / temperature) + noise
        better = score > plain
        plain = tl.where(better, score, plain)
        plain_tile = tl.where(better, tile, plain_tile)
        if rejected:
            y = tl.load(draft_row + token, mask=token < V, other=float("-inf")).to(tl.float32)
            weight = tl.exp2(x * scale - target_max) * target_part
            weight -= tl.exp2(y * draft_scale - draft_max) * draft_part
            some = weight > 0.0
            score = tl.where(some, fast_log(tl.where(some, weight, 1.0)) + noise, float("-inf"))
            better = score > best
            best = tl.where(better, score, best)
            best_tile = tl.where(better, tile, best_tile)
    splits = tl.num_programs(1)
    at = req * 2 * splits + tl.program_id(1)
    value, token = best_of(best, best_tile, BLOCK)
    tl.store(values_ptr + at, value)
    tl.store(ids_ptr + at, token)
    value, token = best_of(plain, plain_tile, BLOCK)
    tl.store(values_ptr + at + splits, value)
    tl.store(ids_ptr + at + splits, token)


@triton.jit
def _commit_kernel(
    token_ids_ptr,  # [R, WIDTH] int64, in and out
    values_ptr,  # [R, 2, SPLIT] float32
    ids_ptr,  # [R, 2, SPLIT] int32
    committed_ptr,  # [R] int64
    state_ptr,  # [R, 4] float32
    temperature_ptr,  # [R] float32
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    committed = tl.load(committed_ptr + req)
    if tl.load(temperature_ptr + req) <= 0:
        return
    if committed == 0:
        return
    if tl.load(state_ptr + req * 4 + 3) < 0:
        return
    at = req * 2 * SPLIT
    best, token = pick(values_ptr + at, ids_ptr + at, SPLIT, BLOCK)
    _, plain = pick(values_ptr + at + SPLIT, ids_ptr + at + SPLIT, SPLIT, BLOCK)
    # no residual (nothing was rejected, or rounding hid it): the target's own
    token = tl.where(best == float("-inf"), plain, token)
    tl.store(token_ids_ptr + req * WIDTH + committed - 1, token.to(tl.int64))
