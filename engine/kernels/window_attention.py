"""Attention over a window and compressed entries, with sinks; one K for all heads is V as well.

Query t sees the tokens of its window, (t - window, t], and of the closed entries, those of number
w < (t + 1) // ratio, all or those chosen for it. All go through one softmax with one more logit a
head, the sink, whose value is 0:

    o_h = sum_j e^(q_h . k_j * scale - m) k_j / (sum_j e^(q_h . k_j * scale - m) + e^(sink_h - m))

In a draft block every query sees the same keys: the last `window` tokens before the block, and all
of it. Softmax in float32. Keys of the step itself come from `kv`; older ones from the rings, which
get the step's own after it has attended (see `engine.kernels.rolling`).
"""

from collections.abc import Callable
from functools import partial

import torch

from engine.kernels.contract import Dims
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.rolling import (
    CompressedState,
    Span,
    TokenPlaces,
    ring_read,
    ring_store,
    ring_write,
    spans,
)
from engine.kernels.window_attention_triton import attend_windows


def window_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    ring: torch.Tensor,
    batch: AttentionBatch,
    *,
    window: int,
    scale: float,
    positions: torch.Tensor,
    at: TokenPlaces | None,
    compressed: CompressedState | None = None,
    chosen: torch.Tensor | None = None,
    block: bool = False,
) -> torch.Tensor:
    """Attend, then keep the step's keys.

    Args:
        q: [T, Q, D].
        kv: [T, D] in q's dtype, keys of the step's tokens.
        sinks: [Q] float32.
        ring: [N, C, D] in q's dtype, older keys; written unless `block`.
        batch: The step's requests.
        window: Tokens seen, the query's own included; in a draft block, those before it.
        scale: Multiplies dot products, not the sinks.
        positions: [T] int64.
        at: Where tokens belong; the reference takes that from the batch.
        compressed: Entries, if the layer has any.
        chosen: [T, k] int32, entries of each token, -1 behind them; None: all that are closed.
        block: Are these draft blocks?

    Returns:
        [T, Q, D] in q's dtype; padding rows are 0.
    """
    dims = Dims()
    dims.check("q", q, "T Q D")
    dims.check("kv", kv, "T D", q.dtype)
    dims.check("sinks", sinks, "Q", torch.float32)
    dims.check("ring", ring, "N C D", q.dtype)
    impl: Callable[..., torch.Tensor] = window_attention_ref
    if at is not None:
        impl = partial(window_attention_triton, positions=positions, at=at)
    return impl(
        q,
        kv,
        sinks,
        ring,
        batch,
        window=window,
        scale=scale,
        compressed=compressed,
        chosen=chosen,
        block=block,
    )


def window_attention_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    ring: torch.Tensor,
    batch: AttentionBatch,
    *,
    window: int,
    scale: float,
    compressed: CompressedState | None = None,
    chosen: torch.Tensor | None = None,
    block: bool = False,
) -> torch.Tensor:
    """`window_attention` in torch, a request at a time: the definition a kernel is held to."""
    out = torch.zeros_like(q)
    for span in spans(batch):
        oldest = max(span.start - window + (0 if block else 1), 0)
        keys = torch.cat((ring_read(ring, span.row, oldest, span.start), kv[span.tokens]))
        hidden = _outside(span, oldest, window, q.device)
        if block:
            hidden = torch.zeros_like(hidden)
        if compressed is not None and (count := span.stop // compressed.ratio):
            keys = torch.cat((keys, compressed.entries[span.entries(0, count, compressed.ratio)]))
            mine = None if chosen is None else chosen[span.tokens]
            open_ones = _unseen(span, count, compressed.ratio, mine, q.device)
            hidden = torch.cat((hidden, open_ones), dim=1)
        out[span.tokens] = _attend(q[span.tokens], keys, hidden, sinks, scale)
        if not block:
            ring_write(ring, span.row, span.start, kv[span.tokens])
    return out


def window_attention_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    ring: torch.Tensor,
    batch: AttentionBatch,
    *,
    positions: torch.Tensor,
    at: TokenPlaces,
    window: int,
    scale: float,
    compressed: CompressedState | None = None,
    chosen: torch.Tensor | None = None,
    block: bool = False,
) -> torch.Tensor:
    """`window_attention` as one launch, and the rings' new keys."""
    out = attend_windows(
        q,
        kv,
        sinks,
        ring,
        positions,
        at,
        batch.block_table,
        batch.kv_block_size,
        window=window,
        scale=scale,
        compressed=compressed,
        chosen=chosen,
        block=block,
    )
    if not block:
        ring_store(ring, kv, positions, None, at)
    return out


def _outside(span: Span, oldest: int, window: int, device: torch.device) -> torch.Tensor:
    """[n, keys] True where a token lies outside a query's window."""
    query = torch.arange(span.start, span.stop, device=device)[:, None]
    key = torch.arange(oldest, span.stop, device=device)
    return (key > query) | (key <= query - window)


def _unseen(
    span: Span, count: int, ratio: int, chosen: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """[n, entries] True where an entry is open, or was not chosen."""
    closed = torch.arange(span.start + 1, span.stop + 1, device=device) // ratio
    unseen = torch.arange(count, device=device) >= closed[:, None]
    if chosen is None:
        return unseen
    # one column more, for what was not chosen
    picked = torch.zeros(span.count, count + 1, dtype=torch.bool, device=device)
    picked.scatter_(1, torch.where(chosen < 0, count, chosen).long(), True)
    return unseen | ~picked[:, :count]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor, scale: float
) -> torch.Tensor:
    """One request: q [n, Q, D] against keys [m, D]; hidden [n, m]."""
    wide = keys.float()
    scores = (q.float() * scale) @ wide.t()
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    columns = sinks[None, :, None].expand(len(q), -1, 1)
    shares = torch.cat((scores, columns), dim=2).softmax(dim=2)[..., :-1]
    return (shares @ wide).to(q.dtype)
