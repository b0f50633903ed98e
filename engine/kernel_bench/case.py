"""An op at one shape: inputs, how to call it, whether it is right, and what it must move."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Inputs = tuple[Any, ...]
Check = Callable[[Inputs, Any], str | None]
"""Given inputs and what the op made of them: None, or what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    op: str
    shape: str
    make: Callable[[], Inputs]
    """New inputs, in memory of their own."""

    run: Callable[[Inputs], Any]
    check: Check
    nbytes: float
    """Read and written, each value once."""

    flops: float = 0.0
    """Of its products."""


def as_good_as(
    name: str, actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor
) -> str | None:
    """Hold `actual` to twice the error of the reference in the same dtype.

    Args:
        name: For the complaint.
        actual: The op's output.
        exact: The reference on the same inputs in float32.
        low: The reference in actual's dtype.

    Returns:
        None, or the error and its bound. In float32, where the reference is as exact as it gets,
        the bound is 1e-5 of the largest value: the order of sums.
    """
    if actual.shape != exact.shape or actual.dtype != low.dtype:
        return f"{name} is {actual.dtype} {list(actual.shape)}, expected {low.dtype}"
    size = float(exact.abs().max())
    if actual.dtype == torch.float32:
        limit = 1e-5 * size
    else:
        limit = 2 * float((low.float() - exact).abs().max()) + 1e-6 * size
    error = float((actual.float() - exact).abs().max())
    if error <= limit:  # false for NaN
        return None
    return f"{name} is off by {error:.3g}, {limit:.3g} is allowed"


def equal(name: str, actual: torch.Tensor, want: torch.Tensor) -> str | None:
    """Integers and copies are the same, or it says how many are not."""
    if actual.shape != want.shape or actual.dtype != want.dtype:
        return f"{name} is {actual.dtype} {list(actual.shape)}, expected {want.dtype}"
    wrong = int((actual != want).sum())
    return None if wrong == 0 else f"{wrong} of {actual.numel()} values of {name} differ"


def first(*complaints: str | None) -> str | None:
    """The first that is one."""
    return next((text for text in complaints if text is not None), None)
