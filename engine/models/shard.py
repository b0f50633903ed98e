"""Which part of a tensor a rank holds: rows of what widens, columns of what narrows, whole heads.

Parts are of equal width on all ranks, so that every shape is; the last ones may end in zeros.
"""

from dataclasses import dataclass, replace

import torch

from engine.errors import ConfigError
from engine.models.config import LayersSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Indices [start, stop) of one dimension, and zeros behind them up to `width`."""

    dim: int
    start: int
    stop: int
    width: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the part."""
        return (*shape[: self.dim], self.width, *shape[self.dim + 1 :])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that is there in full."""
        return self.pad(whole.narrow(self.dim, self.start, self.stop - self.start))

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros behind indices [start, stop)."""
        missing = self.width - (self.stop - self.start)
        if missing == 0:
            return x
        shape = (*x.shape[: self.dim], missing, *x.shape[self.dim + 1 :])
        return torch.cat((x, x.new_zeros(shape)), dim=self.dim)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's parts of everything; of one rank, the whole of it."""

    rank: int = 0
    size: int = 1

    def width(self, total: int) -> int:
        """Equal parts of `total`, rounded up."""
        return -(-total // self.size)

    def even(self, total: int, dim: int) -> Part | None:
        """This rank's part of `total` indices of dimension `dim`; None: all of them."""
        if self.size == 1:
            return None
        width = self.width(total)
        start = min(self.rank * width, total)
        return Part(dim, start, min(start + width, total), width)

    def heads(self, spec: LayersSpec, of: str, dim: int) -> Part | None:
        """This rank's heads, as indices of dimension `dim` of a projection.

        Args:
            spec: The whole stack.
            of: "q", or "k" or "v".
            dim: 0 where heads are rows, 1 where they are columns.
        """
        if self.size == 1:
            return None
        mine = self.layers(spec)
        if of == "q":
            first, count = self.rank * mine.num_heads, mine.num_heads
        else:
            first, count = self.rank * spec.num_kv_heads // self.size, mine.num_kv_heads
        start, width = first * spec.head_dim, count * spec.head_dim
        return Part(dim, start, start + width, width)

    def layers(self, spec: LayersSpec) -> LayersSpec:
        """The stack as this rank computes it.

        Raises:
            ConfigError: Its heads cannot be dealt evenly.
        """
        if self.size == 1:
            return spec
        check_heads(spec, self.size, "the network")
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(spec.num_kv_heads // self.size, 1),
            intermediate_size=self.width(spec.intermediate_size),
        )


def check_heads(spec: LayersSpec, size: int, whose: str) -> None:
    """Refuse a number of ranks that heads cannot be dealt to.

    KV heads are dealt too, or, where there are fewer of them than ranks, each is held by several
    ranks: sound as long as the query heads of a rank all use the same one.

    Args:
        spec: The whole stack.
        size: Ranks.
        whose: For the message: "the target" or "the draft".

    Raises:
        ConfigError: Says which numbers of ranks would do.
    """
    good = [n for n in range(1, spec.num_heads + 1) if _divides(spec, n)]
    if size not in good:
        raise ConfigError(
            f"-tp {size}: {whose} has {spec.num_heads} heads and {spec.num_kv_heads} KV heads, "
            f"which cannot be dealt to {size} ranks",
            f"use -tp {_listed(good)}",
        )


def _divides(spec: LayersSpec, size: int) -> bool:
    heads, kv = spec.num_heads, spec.num_kv_heads
    return heads % size == 0 and (kv % size == 0 or size % kv == 0)


def _listed(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
