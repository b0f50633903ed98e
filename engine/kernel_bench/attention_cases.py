"""Attention as rounds and prefills ask for it."""

from dataclasses import dataclass

import torch

from engine.kernel_bench.case import Case, Inputs, as_good_as
from engine.kernels.paged_attention import AttentionBatch, paged_attention, paged_attention_ref
from engine.models.config import LayersSpec
from engine.models.layers import Placement

_KV_BLOCK = 32
_CHUNK = 512
"""Queries the reference looks at together: its scores take memory."""


@dataclass(frozen=True, slots=True)
class Asked:
    """R requests of so many queries each, which come after a context."""

    requests: int
    context: int
    queries: int
    causal: bool = True

    @property
    def length(self) -> int:
        """KV tokens of a request."""
        return self.context + self.queries

    @property
    def pairs(self) -> float:
        """Query-key pairs that are not masked, of all requests."""
        own = (self.queries + 1) / 2 if self.causal else self.queries
        return self.requests * self.queries * (self.context + own)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "both ways"
        return f"{self.requests} x ({self.context} + {self.queries}) {mask}"


def attention_case(asked: Asked, spec: LayersSpec, at: Placement) -> Case:
    """Inputs: q [T, Q, D], k and v [P, K, D], the batch; KV blocks in random order."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    scale, tokens = dim**-0.5, asked.requests * asked.queries

    def make() -> Inputs:
        columns = -(-asked.length // _KV_BLOCK)
        slots = asked.requests * columns * _KV_BLOCK

        def randn(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=at.dtype, device=at.device).normal_()

        q, k, v = (randn(n, h, dim) for n, h in ((tokens, heads), *[(slots, kv_heads)] * 2))
        return q, k, v, _batch(asked, columns, at.device)

    def run(inputs: Inputs) -> torch.Tensor:
        q, k, v, batch = inputs
        return paged_attention(q, k, v, batch, scale=scale, causal=asked.causal)

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        q, k, v, batch = inputs
        exact = _reference(asked, scale, q, k, v, batch, torch.float32)
        return as_good_as("out", out, exact, _reference(asked, scale, q, k, v, batch, at.dtype))

    item = at.dtype.itemsize
    kv = 2 * asked.requests * asked.length * kv_heads * dim * item
    return Case(
        op="attention",
        shape=str(asked),
        make=make,
        run=run,
        check=check,
        nbytes=kv + 2 * tokens * heads * dim * item,
        flops=4 * asked.pairs * heads * dim,
    )


def _batch(asked: Asked, columns: int, device: torch.device) -> AttentionBatch:
    count, length = asked.requests, asked.length
    table = torch.randperm(count * columns, device=device).view(count, columns)
    slots = (table[:, :, None] * _KV_BLOCK + torch.arange(_KV_BLOCK, device=device)).flatten(1)
    return AttentionBatch(
        block_table=table.int(),
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device) * asked.queries,
        seq_lens=torch.full((count,), length, dtype=torch.int32, device=device),
        kv_block_size=_KV_BLOCK,
        query_lens=(asked.queries,) * count,
        kv_lens=(length,) * count,
        kv_index=tuple(own[:length] for own in slots),
    )


def _reference(
    asked: Asked,
    scale: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[T, Q, D] in `dtype`, some queries of one request at a time."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    step = _CHUNK if asked.causal else asked.queries
    for r, index in enumerate(batch.kv_index):
        own_k, own_v = k[index].to(dtype), v[index].to(dtype)
        for begin in range(0, asked.queries, step):
            count = min(step, asked.queries - begin)
            length = asked.context + begin + count if asked.causal else asked.length
            alone = AttentionBatch(
                batch.block_table[:0],  # the reference reads the host's fields
                batch.cu_seqlens_q[:0],
                batch.seq_lens[:0],
                _KV_BLOCK,
                (count,),
                (length,),
                (slice(0, length),),
            )
            at = slice(r * asked.queries + begin, r * asked.queries + begin + count)
            out[at] = paged_attention_ref(
                q[at].to(dtype), own_k, own_v, alone, scale=scale, causal=asked.causal
            )
    return out
