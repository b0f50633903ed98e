"""A weight matrix laid out for its device: y = x W^T + b.

x [T, in], W [out, in], y [T, out]; reads W once: out*in*itemsize bytes a call.

On a CPU, float32 weights are re-ordered once into oneDNN's blocked layout. A product with few rows
then runs at memory speed (SmolLM2-135M on two cores: 8 rows 26 ms instead of 79, 1 row 23 instead
of 47), and gives every row the same bits whatever else is in the batch. On a GPU few rows take a
kernel of ours where that is faster, and so do row counts whose tiles fill the device evenly.
"""

import os

import torch

from engine.kernels.activation import silu_mul
from engine.kernels.few_rows import MOST_ROWS, few_rows_of, few_rows_triton
from engine.kernels.launch import multiprocessors
from engine.kernels.tile_linear import (
    Tiles,
    choose_tiles,
    takes_tiles,
    tile_linear_triton,
)

# torch keeps one compiled oneDNN product per shape, up to 1024 of them at some 0.4 MB each; prompts
# of many lengths then hold half a gigabyte. Rounds need a few dozen. Read at the first product.
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "128")

_PACK_ROWS = 64
"""Row count the blocked layout is chosen for; the layout is the same for all row counts we use."""


def can_pack(weight: torch.Tensor) -> bool:
    """Is there a blocked layout for this matrix here?"""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class Linear:
    """An immutable matrix and bias, applied to rows."""

    __slots__ = ("bias", "few", "in_features", "out_features", "packed", "tiled", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = True
    ) -> None:
        """Take over `weight` [out, in] and `bias` [out].

        Args:
            weight: The matrix. Callers that also index its rows keep their own reference.
            bias: Added to each row, or None.
            pack: False keeps the plain layout (for matrices read a row at a time).
        """
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = pack and can_pack(weight)
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight
        )
        self.few = few_rows_of(weight)
        self.tiled = takes_tiles(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` [T, in]; returns [T, out] in x's dtype."""
        if self.packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.weight, self.bias, "none", [], ""
            )
            return y
        if self.few is not None and self.takes_few(len(x)):
            return few_rows_triton(x, self.weight, self.bias, self.few)
        if (tiles := self.tiles(len(x))) is not None:
            return tile_linear_triton(x, self.weight, tiles)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Of an MLP's gate over its up: `silu_mul` of what `x` [T, in] gives; [T, out / 2]."""
        if self.few is not None and self.takes_few(len(x)):
            return few_rows_triton(x, self.weight, self.bias, self.few, gated=True)
        if (tiles := self.tiles(len(x), gated=True)) is not None:
            return tile_linear_triton(x, self.weight, tiles, gated=True)
        return silu_mul(self(x))

    def takes_few(self, rows: int) -> bool:
        """Are so many rows few enough for a kernel of ours?"""
        return self.few is not None and rows <= MOST_ROWS

    def tiles(self, rows: int, *, gated: bool = False) -> Tiles | None:
        """How a kernel of ours cuts so many rows; None: the product is torch's."""
        if not self.tiled:
            return None
        columns = self.out_features // 2 if gated else self.out_features
        return choose_tiles(rows, columns, multiprocessors(self.weight.device), gated=gated)

    def multiplies(self, rows: int) -> bool:
        """Is the product of so many rows, by itself, the engine's own and not torch's?"""
        return self.takes_few(rows) or self.tiles(rows) is not None
