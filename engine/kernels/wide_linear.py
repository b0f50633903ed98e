"""A product whose output is float32 whatever its inputs are: y = x W^T.

What compressors keep of a token and what routers choose by is float32, of weights stored in
bfloat16. A GPU multiplies those as they are and rounds no sum; elsewhere both sides are float32.
"""

import torch

from engine.kernels.linear import Linear


class WideLinear:
    """An immutable matrix; no bias."""

    __slots__ = ("_plain", "in_features", "out_features", "weight")

    def __init__(self, weight: torch.Tensor) -> None:
        """Take over `weight` [out, in]: on a GPU in x's dtype, elsewhere float32."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self._plain = Linear(weight) if weight.dtype == torch.float32 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x` [T, in]; returns [T, out] float32."""
        if self._plain is not None:
            return self._plain(x.float())
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)


def wide_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What to hold such a matrix in, for inputs of `dtype`."""
    return dtype if device.type == "cuda" else torch.float32
