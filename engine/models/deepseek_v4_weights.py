"""DeepSeek-V4 weights as products take them: joined, dealt to ranks, packed where the files are.

Attention, shared experts and the drafter's projection of taps are fp8 in released checkpoints,
routed experts fp4 or fp8; a tensor that is packed has a `.scale` beside its `.weight`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import CheckpointError, ConfigError
from engine.kernels.experts import ExpertMatrices
from engine.kernels.linear import Linear
from engine.kernels.packed import FP4_GROUP, FP8_BLOCK, Packed, PackedKind
from engine.kernels.packed_linear import PackedGroups, PackedLinear
from engine.kernels.wide_linear import WideLinear, wide_dtype
from engine.models.deepseek_v4_names import spellings
from engine.models.layers import Placement, Weights
from engine.models.shard import Part

_GATE_UP = ("w1", "w3")
"""Of an expert, as released; w2 is the way down."""

_FP8_STORED = {"F8_E4M3": torch.float8_e4m3fn}
_FP4_STORED = dict.fromkeys(("I8", "U8"), torch.uint8)
_POWERS = dict.fromkeys(("F8_E8M0", "U8"), torch.uint8)
_SCALES = {**_POWERS, "F32": torch.float32}


class Stored(Weights, Protocol):
    """Where tensors of any dtype come from; engine.models.loader.Checkpoint is one."""

    def stored(self, name: str) -> str:
        """The dtype a tensor is stored in, as safetensors spells it."""

    def take_raw(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stored: Mapping[str, torch.dtype],
        device: torch.device,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Read one tensor's bits."""


class Stacked:
    """Matrices over each other, each laid out for itself; the interface is `Linear`'s."""

    def __init__(self, each: Sequence[Linear | PackedLinear]) -> None:
        """Take over matrices with the same inputs."""
        self.each = each
        self.out_features = sum(m.out_features for m in each)
        self.in_features = each[0].in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out], the first matrix's outputs first."""
        return torch.cat([m(x) for m in self.each], dim=1)


Matrix = Linear | PackedLinear | Stacked


class Groups:
    """A matrix for each group of inputs, side by side; the interface is `PackedGroups`'."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Take over [groups, out, in]."""
        self.weight = weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, groups, in] to [T, groups * out]."""
        return torch.einsum("tgk,gnk->tgn", x, self.weight).flatten(1)


Grouped = Groups | PackedGroups


class Filled:
    """The experts of a layer in one tensor, or two where they are packed, filled one by one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kind: PackedKind | None = None
        self._block = FP8_BLOCK
        self._parts: list[torch.Tensor] = []

    def put(self, expert: int, rows: Sequence[torch.Tensor | Packed]) -> None:
        """One expert: matrices over each other, all packed alike or none of them."""
        if isinstance(rows[0], Packed):
            packed = [each for each in rows if isinstance(each, Packed)]
            self._kind, self._block = packed[0].kind, packed[0].block
            if self._kind == "fp8" and len(rows) > 1 and packed[0].out_features % self._block:
                raise _unaligned("experts", packed[0].out_features)
            joined = [torch.cat([p.weight for p in packed]), torch.cat([p.scale for p in packed])]
        else:
            joined = [torch.cat([each for each in rows if isinstance(each, torch.Tensor)])]
        if not self._parts:
            self._parts = [x.new_empty((self._count, *x.shape)) for x in joined]
        for whole, x in zip(self._parts, joined, strict=True):
            whole[expert] = x

    def whole(self) -> torch.Tensor | Packed:
        """All of them; of none, nothing."""
        if not self._parts:
            return torch.empty(0, 1, 1)
        if self._kind is None:
            return self._parts[0]
        weight, scale = self._parts
        return Packed(self._kind, weight, scale, self._block)


def joined(found: Sequence[torch.Tensor | Packed]) -> Sequence[torch.Tensor | Packed]:
    """One matrix of several, if all are fp8 and end where blocks do."""
    packed = [m for m in found if isinstance(m, Packed) and m.kind == "fp8"]
    whole = len(packed) == len(found) > 1 and not any(
        m.out_features % m.block or m.scale.dtype != packed[0].scale.dtype for m in packed
    )
    if not whole:
        return found
    weight, scale = (torch.cat([getattr(m, part) for m in packed]) for part in ("weight", "scale"))
    return [Packed("fp8", weight, scale, packed[0].block)]


def _divided(part: Part | None, by: tuple[int, int], name: str) -> Part | None:
    """A part of a tensor with a number for so many rows and columns."""
    if part is None:
        return None
    unit = by[part.dim]
    if part.start % unit or part.width % unit or part.stop != part.start + part.width:
        raise _unaligned(name, part.width)
    return Part(part.dim, part.start // unit, part.stop // unit, part.width // unit)


def _unaligned(name: str, width: int) -> ConfigError:
    return ConfigError(
        f"{name}: parts of {width} rows or columns cut through what shares a scale",
        "use a smaller -tp, if these are a rank's parts",
    )


class V4Weights:
    """Tensors by released names, where a network is to have them.

    Args:
        weights: Where they come from.
        has: Is there a tensor of this name?
        at: Dtype, device and ranks of the network.
        fp8_block: Rows and columns of fp8 that share a scale.
        folder: Where the checkpoint lies; None: made-up weights lie nowhere.
    """

    def __init__(
        self,
        weights: Stored,
        has: Callable[[str], bool],
        at: Placement,
        fp8_block: int = FP8_BLOCK,
        folder: Path | None = None,
    ) -> None:
        self._weights = weights
        self._has = has
        self.at = at
        self._block = fp8_block
        self.folder = folder

    @property
    def for_attention(self) -> "V4Weights":
        """The same, for a part that every rank may hold all of."""
        return V4Weights(self._weights, self._has, self.at.attention, self._block, self.folder)

    def has(self, name: str) -> bool:
        """Is there a tensor of this released name, in any spelling?"""
        return any(self._has(each) for each in spellings(name))

    def take(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """A tensor in the network's dtype, checked against its whole shape, or a part of it."""
        return self._take(name, shape, self.at.dtype, part)

    def wide(self, name: str, *shape: int, part: Part | None = None) -> torch.Tensor:
        """A tensor in float32, whatever the network's dtype is."""
        return self._take(name, shape, torch.float32, part)

    def numbers(self, name: str, *shape: int, below: int) -> torch.Tensor:
        """A tensor of integers in [0, below), int64.

        Raises:
            CheckpointError: One is not; an index out of bounds ends a run on a GPU for good.
        """
        found = self._take(name, shape, torch.int64, None)
        if not found.is_meta:
            low, high = (int(x) for x in found.aminmax())
            if low < 0 or high >= below:
                raise CheckpointError(
                    f"{name}: {low if low < 0 else high} is outside [0, {below})",
                    "download the checkpoint again",
                )
        return found

    def wide_matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> WideLinear:
        """One product, float32 out of it, of several matrices over each other.

        Args:
            names: Without `.weight`.
            rows: Of each.
            columns: Of all.
        """
        dtype = wide_dtype(self.at.dtype, self.at.device)
        sizes = zip(names, rows, strict=True)
        parts = [self._take(f"{n}.weight", (r, columns), dtype, None) for n, r in sizes]
        return WideLinear(torch.cat(parts))

    def matrix(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, dim: int | None = None
    ) -> Matrix:
        """One product of several matrices over each other, packed if they are.

        Args:
            names: Without `.weight`.
            rows: Of each whole matrix.
            columns: Of all.
            dim: Dealt to ranks by rows (0), by columns (1), or held by all (None).
        """
        found = [self._one(n, r, columns, dim) for n, r in zip(names, rows, strict=True)]
        plain = [m for m in found if isinstance(m, torch.Tensor)]
        if len(plain) == len(found):
            return Linear(torch.cat(plain))
        each = [
            Linear(m) if isinstance(m, torch.Tensor) else PackedLinear(m) for m in joined(found)
        ]
        return each[0] if len(each) == 1 else Stacked(each)

    def grouped(self, name: str, groups: int, rows: int, columns: int) -> Grouped:
        """A matrix for each of this rank's groups; `rows` of each."""
        mine = groups // self.at.ranks.size
        found = self._one(name, groups * rows, columns, 0)
        if isinstance(found, torch.Tensor):
            return Groups(found.view(mine, rows, columns))
        size = found.block
        if rows % size and size % rows:
            raise _unaligned(name, rows)
        starts = range(0, mine * rows, rows)
        blocks = [found.scale[s // size : -(-(s + rows) // size)] for s in starts]
        parts = zip(found.weight.split(rows), blocks, strict=True)
        return PackedGroups([Packed("fp8", w.contiguous(), s.contiguous(), size) for w, s in parts])

    def rows(
        self, name: str, rows: int, width: int, group: int, part: Part | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A table [rows, width] to look rows up in, fp8 with an e8m0 scale for `group` numbers.

        Args:
            name: Without `.weight`.
            rows: Of the whole table.
            width: Of a row.
            group: Numbers that share a scale, if there is one.
            part: Rows that are held; None: all.

        Returns:
            The rows, and their scales [rows, width / group] uint8; None where they are numbers.
        """
        if not self.has(f"{name}.scale"):
            return self.take(f"{name}.weight", rows, width, part=part), None
        weight, scale = self._written(f"{name}.weight"), self._written(f"{name}.scale")
        return (
            self._raw(weight, (rows, width), _FP8_STORED, part),
            self._raw(scale, (rows, width // group), _POWERS, part),
        )

    def experts(
        self, prefix: str, count: int, width: int, hidden: int, part: Part | None
    ) -> tuple[ExpertMatrices, ExpertMatrices]:
        """Routed experts: gate over up [E, 2I, H], and down [E, H, I].

        Args:
            prefix: Released, e.g. `layers.0.ffn.experts.`.
            count: Experts of the layer.
            width: I.
            hidden: H.
            part: Which of them; None: all. None are made up to fill its width.
        """
        first, stop = (0, count) if part is None else (part.start, part.stop)
        joint = "model." + prefix.replace(".ffn.", ".mlp.")
        if self._has(joint + "gate_up_proj"):
            every = self.take(joint + "gate_up_proj", count, 2 * width, hidden, part=part)
            downs = self.take(joint + "down_proj", count, hidden, width, part=part)
            return ExpertMatrices(every[: stop - first]), ExpertMatrices(downs[: stop - first])
        gate_up, down = Filled(stop - first), Filled(stop - first)
        for e in range(count):
            if not first <= e < stop:
                self._look_at(f"{prefix}{e}.", width, hidden)
                continue
            gate_up.put(
                e - first, [self._one(f"{prefix}{e}.{n}", width, hidden, None) for n in _GATE_UP]
            )
            down.put(e - first, [self._one(f"{prefix}{e}.w2", hidden, width, None)])
        return ExpertMatrices(gate_up.whole()), ExpertMatrices(down.whole())

    def _look_at(self, prefix: str, width: int, hidden: int) -> None:
        """Check an expert of another rank without reading it."""
        nothing = Part(0, 0, 0, 0)
        for n in (*_GATE_UP, "w2"):
            shape = (hidden, width) if n == "w2" else (width, hidden)
            self._part(f"{prefix}{n}", *shape, nothing)

    def _one(self, name: str, rows: int, columns: int, dim: int | None) -> torch.Tensor | Packed:
        """A matrix as it is stored, or this rank's part of it."""
        shape = (rows, columns)
        part = None if dim is None else self.at.share.even(shape[dim], dim)
        return self._part(name, rows, columns, part)

    def _part(self, name: str, rows: int, columns: int, part: Part | None) -> torch.Tensor | Packed:
        if not self.has(f"{name}.scale"):
            return self.take(f"{name}.weight", rows, columns, part=part)
        weight, scale = self._written(f"{name}.weight"), self._written(f"{name}.scale")
        if self._weights.stored(weight) in _FP4_STORED:
            packed_part = _divided(part, (1, 2), name)
            scale_part = _divided(part, (1, FP4_GROUP), name)
            return Packed(
                "fp4",
                self._raw(weight, (rows, columns // 2), _FP4_STORED, packed_part),
                self._raw(scale, (rows, columns // FP4_GROUP), _POWERS, scale_part),
            )
        size = self._block
        blocks = -(-rows // size), -(-columns // size)
        return Packed(
            "fp8",
            self._raw(weight, (rows, columns), _FP8_STORED, part),
            self._raw(scale, blocks, _SCALES, _divided(part, (size, size), name)),
            size,
        )

    def _raw(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: dict[str, torch.dtype],
        part: Part | None,
    ) -> torch.Tensor:
        return self._weights.take_raw(name, shape, stored=stored, device=self.at.device, part=part)

    def _written(self, name: str) -> str:
        """As the files spell a released name."""
        return next((each for each in spellings(name) if self._has(each)), name)

    def _take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: Part | None
    ) -> torch.Tensor:
        written = self._written(name)
        return self._weights.take(written, shape, dtype=dtype, device=self.at.device, part=part)
