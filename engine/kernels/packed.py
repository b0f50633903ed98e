"""Packed weights: what their bits mean, and their way back to numbers.

    fp8   e4m3, and a scale for every 128 x 128 block (32 x 32 in V4.1): float32, or e8m0
    fp4   e2m1, two in a byte along the input, the lower half first; an e8m0 scale for 32 inputs

e8m0 is a power of two: byte b means 2^(b - 127). e2m1 is a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4
and 6. Either value is exact in bfloat16, scales that are powers of two leave it so.
"""

from dataclasses import dataclass
from typing import Literal

import torch

FP8_BLOCK = 128
FP4_GROUP = 32
PackedKind = Literal["fp8", "fp4"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix [out, in], or several [E, out, in]."""

    kind: PackedKind
    weight: torch.Tensor  # fp8: [.., out, in] float8_e4m3fn; fp4: [.., out, in / 2] uint8
    scale: torch.Tensor
    """fp8: [.., out / block, in / block], both rounded up, float32 or uint8; fp4: uint8
    [.., out, in / 32]."""

    block: int = FP8_BLOCK
    """fp8: rows and columns that share a scale."""

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.weight.shape[-2]

    @property
    def in_features(self) -> int:
        """Columns, unpacked."""
        return self.weight.shape[-1] * (2 if self.kind == "fp4" else 1)

    def __getitem__(self, index: int) -> "Packed":
        """One matrix of several."""
        return Packed(self.kind, self.weight[index], self.scale[index], self.block)


def check_packed(packed: Packed) -> None:
    """Refuse shapes and dtypes that do not belong together.

    Raises:
        ValueError: Names what is wrong.
    """
    weight, scale = packed.weight, packed.scale
    rows, columns = packed.out_features, packed.in_features
    if packed.kind == "fp8":
        want = (*weight.shape[:-2], -(-rows // packed.block), -(-columns // packed.block))
        kinds, stored = [torch.float32, torch.uint8], torch.float8_e4m3fn
    else:
        if columns % FP4_GROUP:
            raise ValueError(f"weight: {columns} inputs are not whole groups of {FP4_GROUP}")
        want = (*weight.shape[:-1], columns // FP4_GROUP)
        kinds, stored = [torch.uint8], torch.uint8
    if weight.dtype != stored:
        raise ValueError(f"weight: expected {stored}, got {weight.dtype}")
    if tuple(scale.shape) != want or scale.dtype not in kinds:
        raise ValueError(
            f"scale: expected {want} of {' or '.join(map(str, kinds))}, got "
            f"{tuple(scale.shape)} of {scale.dtype}"
        )


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; those that are float32 already stay. Byte 255 is not a number."""
    if scale.dtype == torch.float32:
        return scale
    # a float32's exponent has the same bias; the smallest power lies below its normal numbers
    bits = (scale.int() << 23).masked_fill(scale == 0, 1 << 22)
    return bits.view(torch.float32).masked_fill(scale == 255, float("nan"))


def unpack(packed: Packed) -> torch.Tensor:
    """The numbers, [.., out, in] float32."""
    scale = e8m0(packed.scale)
    if packed.kind == "fp4":
        table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=scale.device)
        halves = torch.stack((packed.weight & 15, packed.weight >> 4), dim=-1)
        values = table[halves.flatten(-2).long()]
        return values * scale.repeat_interleave(FP4_GROUP, dim=-1)
    wide = scale.repeat_interleave(packed.block, dim=-2)[..., : packed.out_features, :]
    wide = wide.repeat_interleave(packed.block, dim=-1)[..., : packed.in_features]
    return packed.weight.float() * wide


def pack(
    x: torch.Tensor, kind: PackedKind, *, float_scale: bool = False, block: int = FP8_BLOCK
) -> Packed:
    """The nearest packed weights; for tests and made-up weights.

    Args:
        x: [.., out, in].
        kind: fp8 or fp4.
        float_scale: fp8 with float32 scales in place of powers of two.
        block: fp8: rows and columns that share a scale.
    """
    x = x.float()
    if kind == "fp4":
        groups = x.unflatten(-1, (-1, FP4_GROUP))
        scale = _power(groups.abs().amax(dim=-1) / 6.0)
        scaled = groups / e8m0(scale)[..., None]
        table = torch.tensor(_E2M1, device=x.device)
        code = (scaled.abs()[..., None] - table).abs().argmin(dim=-1) + 8 * (scaled < 0)
        code = code.flatten(-2).to(torch.uint8)
        return Packed("fp4", code[..., ::2] | (code[..., 1::2] << 4), scale)
    rows, columns = x.shape[-2:]
    pad = (0, -columns % block, 0, -rows % block)
    blocks = torch.nn.functional.pad(x, pad).unflatten(-1, (-1, block))
    blocks = blocks.unflatten(-3, (-1, block))
    most = blocks.abs().amax(dim=(-3, -1)) / 448.0
    scale = most.clamp(min=1e-12) if float_scale else _power(most)
    wide = unpack(Packed("fp8", torch.ones_like(x).to(torch.float8_e4m3fn), scale, block))
    return Packed("fp8", (x / wide).to(torch.float8_e4m3fn), scale, block)


def _power(most: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below, as e8m0."""
    exponent = torch.ceil(torch.log2(most.clamp(min=2.0**-126)))
    return (exponent + 127).clamp(1, 254).to(torch.uint8)
