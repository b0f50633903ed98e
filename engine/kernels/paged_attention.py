"""Attention of ragged queries over a paged KV cache, with the masks of a DSpark round.

Request r has n queries, its last n tokens; its KV holds `seq_len` tokens, the queries' included.
C = seq_len - n tokens come before the first query: the context. Query i sees key j iff

    j >= C - window (window > 0 only)   and   (j < C  or  not causal  or  j - C <= i)

Causal without a window is prefill and verify; bidirectional is a draft block; with a window the
context is cut at the same place for every query of the block, as DSpark drafts are trained.
Grouped queries (GQA) share a KV head; keys are never repeated. Softmax in float32.
"""

from dataclasses import dataclass

import torch

from engine.kernels.contract import Dims
from engine.kernels.paged_attention_triton import paged_attention_triton


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Who attends to what, for every layer of one forward. R requests, T tokens, M blocks.

    The reference takes lengths from the host fields. The kernels take them from the tensors; there
    the host fields are upper bounds of which only the largest counts, and kv_index may be empty.
    """

    block_table: torch.Tensor  # [R, M] int32, KV block ids in order
    cu_seqlens_q: torch.Tensor  # [R+1] int32, prefix sums of queries per request
    seq_lens: torch.Tensor  # [R] int32, KV tokens, queries included
    kv_block_size: int
    query_lens: tuple[int, ...]  # host copy of the differences of cu_seqlens_q
    kv_lens: tuple[int, ...]  # host copy of seq_lens
    kv_index: tuple[slice | torch.Tensor, ...]  # host: where each request's KV lies, in order
    rows: torch.Tensor | None = None  # [R] int64, for state that is kept by row
    own: "OwnPart | None" = None
    """What this rank holds of the batch, where ranks hold requests: see `own_tokens`."""

    @property
    def max_query_len(self) -> int:
        """No request has more queries."""
        return max(self.query_lens, default=0)

    @property
    def max_kv_len(self) -> int:
        """No request has more KV tokens."""
        return max(self.kv_lens, default=0)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A batch dealt to the ranks that hold its requests. N ranks, T' tokens each at most."""

    rank: int
    token: torch.Tensor  # [N, T'] int64, in owner-major order; room left over: token 0
    place: torch.Tensor  # [T] int64, where a token lies in that order
    batch: AttentionBatch
    """This rank's requests; rows, blocks and tokens are its own."""

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T', ...] of a batch [T, ...]."""
        return x[self.token[self.rank]]


def locate_kv(
    blocks: list[int], seq_len: int, kv_block_size: int, device: torch.device
) -> slice | torch.Tensor:
    """Slots of a request's first `seq_len` tokens: a slice when its blocks are adjacent."""
    used = blocks[: -(-seq_len // kv_block_size)]
    first = used[0]
    if used == list(range(first, first + len(used))):
        start = first * kv_block_size
        return slice(start, start + seq_len)
    ids = torch.tensor(used, dtype=torch.int64, device=device)
    offsets = torch.arange(kv_block_size, device=device)
    return (ids[:, None] * kv_block_size + offsets).flatten()[:seq_len]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> torch.Tensor:
    """Attend every query to its request's KV.

    Args:
        q: [T, Q, D].
        k_cache: [slots, K, D], one layer; Q is a multiple of K.
        v_cache: [slots, K, D].
        batch: Lengths and block tables; sum of query_lens <= T, the rest is padding.
        scale: Multiplies the scores.
        causal: Among the queries of one request.
        window: Context tokens visible before the first query; 0 = all.

    Returns:
        [T, Q, D] in q's dtype; padding rows are 0.
    """
    dims = Dims()
    dims.check("q", q, "T Q D")
    dims.check("k_cache", k_cache, "P K D", q.dtype)
    dims.check("v_cache", v_cache, "P K D", q.dtype)
    if dims["Q"] % dims["K"]:
        raise ValueError(f"q: {dims['Q']} heads are not a multiple of {dims['K']} KV heads")
    if q.is_cuda:
        return paged_attention_triton(
            q,
            k_cache,
            v_cache,
            batch.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            kv_block_size=batch.kv_block_size,
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
            scale=scale,
            causal=causal,
            window=window,
        )
    return paged_attention_ref(
        q, k_cache, v_cache, batch, scale=scale, causal=causal, window=window
    )


def paged_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> torch.Tensor:
    """`paged_attention` a request at a time, so that a row's bits do not depend on the batch."""
    out = torch.zeros_like(q)
    begin = 0
    for n, seq_len, index in zip(batch.query_lens, batch.kv_lens, batch.kv_index, strict=True):
        if n == 0:
            continue
        first = max(seq_len - n - window, 0) if window else 0
        out[begin : begin + n] = _attend(
            q[begin : begin + n],
            k_cache[index][first:],
            v_cache[index][first:],
            scale,
            causal,
        )
        begin += n
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """One request: q [n, Q, D] against k, v [S, K, D], the last n of which are its own."""
    n, num_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = num_heads // kv_heads
    # queries of one KV head side by side: one product per KV head
    rows = q.view(n, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(rows.float() * scale, k.permute(1, 2, 0).float())
    if causal and n > 1:
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        own = scores.view(kv_heads, group, n, -1)[..., k.shape[0] - n :]
        own.masked_fill_(hidden, float("-inf"))
    out = torch.bmm(scores.softmax(dim=-1), v.permute(1, 0, 2).float())
    out = out.view(kv_heads, group, n, head_dim).permute(2, 0, 1, 3)
    return out.reshape(n, num_heads, head_dim).to(q.dtype)
