"""Lightning indexer (DeepSeek-V4): which compressed entries a token attends to.

    score(t, w) = sum_h weight[t, h] * relu(q[t, h] . key[w]) * D^-1/2

in float32, over entries that are closed for t: w < (t + 1) // ratio. The top k are chosen; where no
more than k are closed, all of them. Of equal scores (ReLU makes many zeros) the earlier entry wins,
so that the choice does not depend on what else is scored.

V4.1 chooses on two levels: one layer finds blocks of successive entries, those whose best entries
score highest and in any case the newest one, and the layers after it choose inside them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.kernels.contract import Dims
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.rolling import CompressedState, TokenPlaces, spans
from engine.kernels.select_entries_triton import score_keys

_KEYS = 1 << 25
"""Keys that are held at once: 256 MiB. Longer steps are taken in pieces."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of entries that may be chosen from."""

    size: int
    """Successive entries of each."""

    count: int
    """B: how many a token keeps; all, where it has no more."""

    inside: torch.Tensor | None = None
    """[T, B] int32, each token's, -1 for none: found before. None: to be found."""


class Choice(NamedTuple):
    """What tokens attend to."""

    entries: torch.Tensor
    """[T, k] int32, numbers of entries in any order, and -1 behind them where there are fewer."""

    blocks: torch.Tensor | None = None
    """[T, B] int32, where they were to be found and someone has more than B."""


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    batch: AttentionBatch,
    top_k: int,
    positions: torch.Tensor,
    at: TokenPlaces | None,
    blocks: Blocks | None = None,
) -> Choice:
    """Choose entries.

    Args:
        q: [T, N, D], index queries.
        weights: [T, N], of the index heads.
        state: Index keys.
        batch: The step's requests.
        top_k: k; with blocks, no more than they hold.
        positions: [T] int64.
        at: Where tokens belong; the reference takes that from the batch.
        blocks: What to choose inside of, or to find; None: all entries, on one level.
    """
    dims = Dims()
    dims.check("q", q, "T N D", state.entries.dtype)
    dims.check("weights", weights, "T N")
    dims.check("state.entries", state.entries, "E D")
    if at is None:
        return select_entries_ref(q, weights, state, batch, top_k, blocks)
    return select_entries_triton(q, weights, state, batch, top_k, positions, at, blocks)


def _to_find(blocks: Blocks | None, most: int) -> Blocks | None:
    """Those that are to be found, if anyone has more than are kept."""
    if blocks is None or blocks.inside is not None or most <= blocks.count * blocks.size:
        return None
    return blocks


def select_entries_ref(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    batch: AttentionBatch,
    top_k: int,
    blocks: Blocks | None = None,
) -> Choice:
    """`select_entries` in torch, a request at a time: the definition a kernel is held to."""
    out = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    wanted, found = _to_find(blocks, batch.max_kv_len // state.ratio), None
    if wanted is not None:
        found = torch.full((len(q), wanted.count), -1, dtype=torch.int32, device=q.device)
    scale = q.shape[2] ** -0.5
    for span in spans(batch):
        count = span.stop // state.ratio
        if not count:
            continue
        closed = torch.arange(span.start + 1, span.stop + 1, device=q.device) // state.ratio
        entry = torch.arange(count, device=q.device)
        hidden = entry >= closed[:, None]
        if count <= top_k and found is None:
            chosen = entry.expand(span.count, count)
        else:
            if blocks is not None and blocks.inside is not None:
                hidden |= ~_inside(blocks.inside[span.tokens], blocks.size, count)
            keys = state.entries[span.entries(0, count, state.ratio)].float()
            dots = torch.relu(q[span.tokens].float() @ keys.t()) * scale
            scores = (dots * weights[span.tokens].float()[:, :, None]).sum(dim=1)
            scores = scores.masked_fill(hidden, float("-inf"))
            if wanted is not None and found is not None:
                best = _best_blocks(scores, closed, wanted)
                found[span.tokens, : best.shape[1]] = best
            chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            hidden = hidden.gather(1, chosen)
        out[span.tokens, : chosen.shape[1]] = chosen.masked_fill(hidden, -1).int()
    return Choice(out, found)


def _inside(found: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """[n, count] True where an entry lies in one of the blocks [n, B]."""
    total = -(-count // size)
    # one column more, for what is no block
    kept = torch.zeros(len(found), total + 1, dtype=torch.bool, device=found.device)
    kept.scatter_(1, torch.where(found < 0, total, found).long(), True)
    return kept[:, :total].repeat_interleave(size, dim=1)[:, :count]


def _best_blocks(scores: torch.Tensor, closed: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[n, <= B] int32 of scores [n, entries], -inf where an entry is not closed."""
    pad = (0, -scores.shape[1] % blocks.size)
    padded = torch.nn.functional.pad(scores, pad, value=float("-inf"))
    best = padded.unflatten(1, (-1, blocks.size)).amax(dim=2)
    number = torch.arange(best.shape[1], device=scores.device)
    # only partly filled, it could be outscored by an older one
    newest = number == ((closed - 1) // blocks.size)[:, None]
    ranked = best.masked_fill(newest, float("inf")).sort(dim=1, descending=True, stable=True)
    kept = ranked.indices[:, : blocks.count]
    unseen = ranked.values[:, : blocks.count].isneginf()
    return torch.where(unseen, -1, kept).int()


def select_entries_triton(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    batch: AttentionBatch,
    top_k: int,
    positions: torch.Tensor,
    at: TokenPlaces,
    blocks: Blocks | None = None,
) -> Choice:
    """`select_entries` as one launch and torch's choice of the largest keys."""
    most = batch.max_kv_len // state.ratio
    closed = torch.where(at.row >= 0, (positions + 1) // state.ratio, 0)
    if most <= top_k:  # nobody has more: no scores are needed
        entry = torch.arange(top_k, device=q.device)
        return Choice(torch.where(entry < closed[:, None], entry, -1).int())
    wanted = _to_find(blocks, most)
    inside, size = (None, 1) if blocks is None else (blocks.inside, blocks.size)
    width = most if inside is None else inside.shape[1] * size
    table, kv_block, wide = batch.block_table, batch.kv_block_size, weights.float().contiguous()
    q, step = q.contiguous(), max(_KEYS // width, 1)
    chosen, found = list[torch.Tensor](), list[torch.Tensor]()
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        within = None if inside is None else inside[part]
        where = TokenPlaces(*(x[part] for x in at))
        keys = score_keys(
            q[part], wide[part], state, positions[part], where, table, kv_block, width, within, size
        )
        best = keys.topk(top_k, dim=1).values
        chosen.append(torch.where(best < 0, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF)).int())
        if wanted is not None:
            found.append(_best_blocks_of_keys(keys, closed[part], wanted))
    return Choice(torch.cat(chosen), torch.cat(found) if found else None)


def _best_blocks_of_keys(keys: torch.Tensor, closed: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """[n, B] int32 of keys [n, entries], -1 where an entry is not closed."""
    padded = torch.nn.functional.pad(keys, (0, -keys.shape[1] % blocks.size), value=-1)
    best = padded.unflatten(1, (-1, blocks.size)).amax(dim=2)
    number = torch.arange(best.shape[1], device=keys.device)
    newest = (number == ((closed - 1) // blocks.size)[:, None]) & (closed > 0)[:, None]
    ranked = best.masked_fill(newest, torch.iinfo(torch.int64).max).topk(blocks.count, dim=1)
    return torch.where(ranked.values < 0, -1, ranked.indices).int()
