"""What a network of windows and compressed windows keeps of each request (DeepSeek-V4).

The last tokens are kept in rings, by row: a row that is given to another request starts anew.
Compressed entries grow with the context, and lie in KV blocks. `engine.kernels.rolling` says how
both are addressed, and why a rejected draft undoes nothing.
"""

from dataclasses import dataclass

import torch

from engine.kernels.rolling import CompressedState


@dataclass(frozen=True, slots=True)
class CompressorShape:
    """One compressor's state."""

    ratio: int
    overlap: int
    """Windows that an entry is made of; 0: of nothing that is kept, it comes whole."""

    width: int
    """Channels of an entry."""

    def ring(self, most_queries: int) -> tuple[int, int, int]:
        """Places, pairs and channels that a row keeps."""
        return self.overlap * self.ratio + most_queries, 2, self.overlap * self.width


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's state."""

    window: int
    """Tokens before the newest that may be read."""

    head_dim: int
    compressed: CompressorShape | None = None
    index: CompressorShape | None = None

    @property
    def compressors(self) -> tuple[CompressorShape, ...]:
        """Those there are."""
        return tuple(c for c in (self.compressed, self.index) if c is not None)

    def bytes_a_row(self, most_queries: int, itemsize: int) -> int:
        """Of rings."""
        total = (self.window + most_queries) * self.head_dim * itemsize
        for each in self.compressors:
            places, pairs, width = each.ring(most_queries)
            total += places * pairs * width * torch.float32.itemsize
        return total

    def bytes_a_block(self, kv_block_size: int, itemsize: int) -> int:
        """Of entries."""
        return sum(kv_block_size // c.ratio * c.width * itemsize for c in self.compressors)


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's."""

    window: torch.Tensor  # [N, C, D], K and V in one, of the last tokens
    compressed: CompressedState | None
    index: CompressedState | None
    """What the indexer compares queries with."""


@dataclass(frozen=True, slots=True)
class RollingState:
    """A network's."""

    layers: tuple[LayerState, ...]
    kv_block_size: int
    tokens: torch.Tensor | None = None
    """[N, C] int64, numbers of the last tokens, of networks that look at n-grams."""

    @classmethod
    def allocate(
        cls,
        shapes: tuple[LayerShape, ...],
        num_rows: int,
        num_blocks: int,
        kv_block_size: int,
        most_queries: int,
        *,
        lookback: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "RollingState":
        """Zeroed memory: what was never written must not be NaN.

        Args:
            shapes: By layer.
            num_rows: Rows, the spare one included.
            num_blocks: KV blocks.
            kv_block_size: Tokens of each; every ratio divides it.
            most_queries: Tokens of a row that one pass may write and the next reject.
            lookback: Tokens before a step that it looks at; 0: none.
            dtype: Of keys and entries; what compressors keep of tokens is float32.
            device: Where they lie.
        """

        def compressor(shape: CompressorShape | None) -> CompressedState | None:
            if shape is None:
                return None
            ring = (num_rows, *shape.ring(most_queries))
            entries = (num_blocks * kv_block_size // shape.ratio, shape.width)
            return CompressedState(
                torch.zeros(ring, dtype=torch.float32, device=device),
                torch.zeros(entries, dtype=dtype, device=device),
                shape.ratio,
            )

        def layer(shape: LayerShape) -> LayerState:
            ring = (num_rows, shape.window + most_queries, shape.head_dim)
            return LayerState(
                torch.zeros(ring, dtype=dtype, device=device),
                compressor(shape.compressed),
                compressor(shape.index),
            )

        tokens = None
        if lookback:
            places = lookback + most_queries
            tokens = torch.zeros((num_rows, places), dtype=torch.int64, device=device)
        return cls(tuple(map(layer, shapes)), kv_block_size, tokens)
