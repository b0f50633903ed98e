"""Lightning indexer (DeepSeek-V4): which compressed entries a token attends to.

    score(t, w) = sum_h weight[t, h] * relu(q[t, h] . key[w]) * D^-1/2

in float32, over entries that are closed for t: w < (t + 1) // ratio. The top k are chosen; where no
more than k are closed, all of them. Of equal scores (ReLU makes many zeros) the earlier entry wins,
so that the choice does not depend on what else is scored.
"""

import torch

from engine.kernels.contract import Dims
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.rolling import CompressedState, TokenPlaces, spans
from engine.kernels.select_entries_triton import score_keys


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    batch: AttentionBatch,
    top_k: int,
    positions: torch.Tensor,
    at: TokenPlaces | None,
) -> torch.Tensor:
    """Choose entries.

    Args:
        q: [T, N, D], index queries.
        weights: [T, N], of the index heads.
        state: Index keys.
        batch: The step's requests.
        top_k: k.
        positions: [T] int64.
        at: Where tokens belong; the reference takes that from the batch.

    Returns:
        [T, k] int32, numbers of entries in any order, and -1 behind them where there are fewer.
    """
    dims = Dims()
    dims.check("q", q, "T N D", state.entries.dtype)
    dims.check("weights", weights, "T N")
    dims.check("state.entries", state.entries, "E D")
    if at is None:
        return select_entries_ref(q, weights, state, batch, top_k)
    return select_entries_triton(q, weights, state, batch, top_k, positions, at)


def select_entries_ref(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    batch: AttentionBatch,
    top_k: int,
) -> torch.Tensor:
    """`select_entries` in torch, a request at a time: the definition a kernel is held to."""
    out = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    scale = q.shape[2] ** -0.5
    for span in spans(batch):
        count = span.stop // state.ratio
        if not count:
            continue
        closed = torch.arange(span.start + 1, span.stop + 1, device=q.device) // state.ratio
        entry = torch.arange(count, device=q.device)
        open_ = entry >= closed[:, None]
        if count <= top_k:
            chosen = entry.expand(span.count, count)
        else:
            keys = state.entries[span.entries(0, count, state.ratio)].float()
            dots = torch.relu(q[span.tokens].float() @ keys.t()) * scale
            scores = (dots * weights[span.tokens].float()[:, :, None]).sum(dim=1)
            scores = scores.masked_fill(open_, float("-inf"))
            chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            open_ = open_.gather(1, chosen)
        out[span.tokens, : chosen.shape[1]] = chosen.masked_fill(open_, -1).int()
    return out


def select_entries_triton(
    q: torch.Tensor,
    weights: torch.Tensor,
    state: CompressedState,
    batch: AttentionBatch,
    top_k: int,
    positions: torch.Tensor,
    at: TokenPlaces,
) -> torch.Tensor:
    """`select_entries` as one launch and torch's choice of the largest keys."""
    most = batch.max_kv_len // state.ratio
    if most <= top_k:  # nobody has more: no scores are needed
        entry = torch.arange(top_k, device=q.device)
        closed = torch.where(at.row >= 0, (positions + 1) // state.ratio, 0)
        return torch.where(entry < closed[:, None], entry, -1).int()
    table, size = batch.block_table, batch.kv_block_size
    wide = weights.float().contiguous()
    keys = score_keys(q.contiguous(), wide, state, positions, at, table, size, most)
    best = keys.topk(top_k, dim=1).values
    return torch.where(best < 0, -1, 0x7FFFFFFF - (best & 0x7FFFFFFF)).int()
