"""Packed weights as kernels read them.

fp4 comes with two neighbours in a byte. Here a byte holds input i of one group of 32 and input i of
the next: each half is a tile of one group, with one scale a row. Inputs are filled up to whole
words of four scales. fp8 stays as it is.
"""

from dataclasses import dataclass

import torch

from engine.kernels.packed import FP4_GROUP, Packed, e8m0

_WORD = 4
"""Scales in a word."""

_INPUTS = _WORD * FP4_GROUP
_MOST = {"fp4": 128, "fp8": 134}
"""Largest e8m0 byte that kernels fold into weights: bfloat16 has no greater powers."""


@dataclass(frozen=True, slots=True)
class PairedFp4:
    """One fp4 matrix [out, in], or several [E, out, in], in pairs of groups."""

    weight: torch.Tensor  # [.., out, 64 * words] uint8
    scale: torch.Tensor  # [.., out, words] int32, the first of four scales lowest
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.weight.shape[-2]

    def __getitem__(self, index: int) -> Packed:
        """One matrix of several, as it came."""
        return unpair(PairedFp4(self.weight[index], self.scale[index], self.in_features))


Laid = Packed | PairedFp4


def lay_out(packed: Packed) -> Laid:
    """Make ready for kernels; on a GPU once, when a matrix is read.

    Raises:
        ValueError: A scale of fp4 is beyond what kernels can multiply by.
    """
    most = _MOST[packed.kind]
    large = packed.scale.dtype == torch.uint8 and int(packed.scale.max()) > most
    if packed.kind == "fp8":
        if large:
            return Packed("fp8", packed.weight, e8m0(packed.scale), packed.block)
        return packed
    if large:
        raise ValueError(f"scale: 2^{int(packed.scale.max()) - 127} is above 2^{most - 127}")
    if packed.weight.ndim == 2:
        return _paired(packed)
    count, rows, words = *packed.scale.shape[:2], -(-packed.in_features // _INPUTS)
    weight = packed.weight.new_empty((count, rows, words * _INPUTS // 2))
    scale = torch.empty((count, rows, words), dtype=torch.int32, device=weight.device)
    for e in range(count):  # one by one: codes of all would take four times their memory
        one = _paired(packed[e])
        weight[e], scale[e] = one.weight, one.scale
    return PairedFp4(weight, scale, packed.in_features)


def _paired(packed: Packed) -> PairedFp4:
    rows, fill = packed.out_features, -packed.in_features % _INPUTS
    codes = torch.stack((packed.weight & 15, packed.weight >> 4), dim=-1).flatten(-2)
    codes = torch.nn.functional.pad(codes, (0, fill)).view(rows, -1, 2, FP4_GROUP)
    weight = (codes[:, :, 0] | (codes[:, :, 1] << 4)).view(rows, -1)
    scale = torch.nn.functional.pad(packed.scale, (0, fill // FP4_GROUP), value=127)
    return PairedFp4(weight, scale.contiguous().view(torch.int32), packed.in_features)


def unpair(laid: PairedFp4) -> Packed:
    """The matrix [out, in] as it came."""
    pairs = laid.weight.view(laid.out_features, -1, 1, FP4_GROUP)
    codes = torch.cat((pairs & 15, pairs >> 4), dim=2).view(laid.out_features, -1)
    codes = codes[:, : laid.in_features]
    scale = laid.scale.contiguous().view(torch.uint8)[:, : laid.in_features // FP4_GROUP]
    return Packed("fp4", codes[:, ::2] | (codes[:, 1::2] << 4), scale.contiguous())
