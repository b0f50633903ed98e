"""State addressed by absolute position, and where the requests of a step lie in it.

Token p of row n lies at place p mod C of the row's ring, entry w of a request at its own place of
the request's KV blocks. A verify pass writes the tokens it looks at; of rejected ones nothing is
undone, the pass after it writes the same places. That is sound because a ring is wider than what
may still be read by as many tokens as one pass may write, and because an entry that was made of
rejected tokens is made again when its last token comes again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.launch import dependent, wait_for_inputs
from engine.kernels.paged_attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class CompressedState:
    """A compressor's. N rows, C places, W channels, E entries in all, D channels of an entry."""

    rows: torch.Tensor  # [N, C, 2, W] float32: values and scores of the last tokens
    entries: torch.Tensor  # [E, D]: entry w of a request at (slot of its token w * ratio) / ratio
    ratio: int


def ring_read(ring: torch.Tensor, row: int, first: int, stop: int) -> torch.Tensor:
    """Tokens [first, stop) of one row: [stop - first, ...]."""
    at = torch.arange(first, stop, device=ring.device) % ring.shape[1]
    return ring[row, at]


def ring_write(ring: torch.Tensor, row: int, first: int, x: torch.Tensor) -> None:
    """Put tokens `x` [n, ...], the first at position `first`; only the last C of them stay."""
    places = ring.shape[1]
    skip = max(len(x) - places, 0)
    at = torch.arange(first + skip, first + len(x), device=ring.device) % places
    ring[row, at] = x[skip:].to(ring.dtype)


@dataclass(frozen=True, slots=True)
class Span:
    """One request's tokens of a step, on the host."""

    row: int
    begin: int
    """Its first token's place in the batch."""

    count: int
    start: int
    """Its first token's position."""

    slots: slice | torch.Tensor
    """KV slots of its tokens from position 0 on."""

    @property
    def tokens(self) -> slice:
        """Its tokens in the batch."""
        return slice(self.begin, self.begin + self.count)

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + self.count

    def entries(self, first: int, stop: int, ratio: int) -> slice | torch.Tensor:
        """Places of entries [first, stop), each at its first token's slot over the ratio."""
        if isinstance(self.slots, slice):
            at = self.slots.start // ratio
            return slice(at + first, at + stop)
        return self.slots[first * ratio : stop * ratio : ratio] // ratio


def spans(batch: AttentionBatch) -> Iterator[Span]:
    """The requests of a step that have tokens; for references, on a CPU."""
    assert batch.rows is not None
    begin = 0
    lens = zip(batch.query_lens, batch.kv_lens, batch.kv_index, strict=True)
    for row, (count, seq_len, slots) in zip(batch.rows.tolist(), lens, strict=False):
        if count:
            yield Span(row, begin, count, seq_len - count, slots)
        begin += count


class TokenPlaces(NamedTuple):
    """Where each token of a step belongs, on the device; made once a forward. T tokens."""

    row: torch.Tensor  # [T] int64; -1: padding
    request: torch.Tensor  # [T] int64
    begin: torch.Tensor  # [T] int64, its request's first token in the batch
    start: torch.Tensor  # [T] int64, that token's position
    stop: torch.Tensor  # [T] int64, the position after its request's last token


def token_places(batch: AttentionBatch, num_tokens: int) -> TokenPlaces:
    """Find every token's request.

    Args:
        batch: The step's requests.
        num_tokens: T, padding behind the last request included.
    """
    assert batch.rows is not None
    cu = batch.cu_seqlens_q.long()
    token = torch.arange(num_tokens, device=cu.device)
    request = torch.searchsorted(cu[1:].contiguous(), token, right=True)
    live = request < len(batch.rows)
    request = request.clamp(max=len(batch.rows) - 1)
    stop = batch.seq_lens[request].long()
    start = stop - (cu[1:] - cu[:-1])[request]
    row = torch.where(live, batch.rows[request], -1)
    return TokenPlaces(row, request, cu[request], start, stop)


def ring_store(
    ring: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    live: torch.Tensor | None,
    at: TokenPlaces,
) -> None:
    """Put some of a step's tokens into the rings of their requests' rows.

    Args:
        ring: [N, C, ...]; the last row is the spare one, which takes what is not kept.
        x: [T, ...].
        positions: [T] int64.
        live: [T] bool, which tokens; None: all. Padding is never kept.
        at: Where tokens belong.
    """
    impl = ring_store_triton if x.is_cuda else ring_store_ref
    impl(ring, x, positions, live, at)


def ring_store_ref(
    ring: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    live: torch.Tensor | None,
    at: TokenPlaces,
) -> None:
    """`ring_store` in torch: the definition the kernel is held to."""
    num_rows, places = ring.shape[:2]
    # of a chunk longer than the ring only the end stays
    kept = (at.row >= 0) & (positions >= at.stop - places)
    live = kept if live is None else live & kept
    ring[torch.where(live, at.row, num_rows - 1), positions % places] = x


def ring_store_triton(
    ring: torch.Tensor,
    x: torch.Tensor,
    positions: torch.Tensor,
    live: torch.Tensor | None,
    at: TokenPlaces,
) -> None:
    """`ring_store` as one launch; what is not kept is not written."""
    x = x.contiguous()
    width = ring[0, 0].numel()
    block = min(_BLOCK, triton.next_power_of_2(width))
    _ring_kernel[(len(x), triton.cdiv(width, block))](
        ring,
        x,
        positions,
        positions if live is None else live,
        at.row,
        at.stop,
        W=width,
        PLACES=ring.shape[1],
        ALL=live is None,
        BLOCK=block,
        **dependent(x),
    )


_BLOCK = 1024


@triton.jit
def _ring_kernel(
    ring_ptr,  # [N, PLACES, W], out
    x_ptr,  # [T, W]
    positions_ptr,  # [T] int64
    live_ptr,  # [T] bool, unless ALL
    row_ptr,  # [T] int64
    stop_ptr,  # [T] int64
    W: tl.constexpr,
    PLACES: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    row, position = tl.load(row_ptr + token), tl.load(positions_ptr + token)
    live = row >= 0
    if not ALL:
        live = live & tl.load(live_ptr + token)
    if live & (position >= tl.load(stop_ptr + token) - PLACES):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < W
        x = tl.load(x_ptr + token * W + column, mask=inside)
        to = ring_ptr + (row * PLACES + position % PLACES) * W + column
        tl.store(to, x.to(ring_ptr.dtype.element_ty), mask=inside)
