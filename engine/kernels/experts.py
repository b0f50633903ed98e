"""A mixture's routed experts: rows to their experts, through them, back with their weights.

    y = sum_j weight_j * down_e(silu(min(gate_e x, c)) * clip(up_e x, -c, c)),   e = experts_j

Pairs of token and expert are sorted by expert, so that an expert's matrices are read once, or once
for every BLOCK_M rows; only experts that have rows are read. A token's sum is taken in the order of
its own experts, in float32, whatever else is in the batch. Ranks hold some experts each; what the
others hold counts for nothing here.
"""

from dataclasses import dataclass, field

import torch

from engine.kernels.contract import Dims
from engine.kernels.cut_silu import cut_silu
from engine.kernels.experts_triton import combine, grouped_product, plan_tiles
from engine.kernels.linear import Linear
from engine.kernels.packed import Packed, check_packed
from engine.kernels.packed_layout import Laid, lay_out
from engine.kernels.packed_linear import PackedLinear


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix an expert: as numbers [E, out, in], or packed; a GPU's are laid out for it."""

    weight: torch.Tensor | Laid
    _each: list[Linear | PackedLinear] = field(init=False)
    """By expert; empty on a GPU, which reads them where they lie."""

    def __post_init__(self) -> None:
        """Lay them out."""
        weight, each = self.weight, list[Linear | PackedLinear]()
        if isinstance(weight, Packed):
            check_packed(weight)
            if weight.weight.is_cuda:
                object.__setattr__(self, "weight", lay_out(weight))
            else:
                each = [PackedLinear(weight[e]) for e in range(len(weight.weight))]
        elif isinstance(weight, torch.Tensor) and not weight.is_cuda:
            each = [Linear(matrix.contiguous()) for matrix in weight]
        object.__setattr__(self, "_each", each)

    def __len__(self) -> int:
        """E."""
        return len(self.weight if isinstance(self.weight, torch.Tensor) else self.weight.weight)

    def of(self, expert: int) -> Linear | PackedLinear:
        """One expert's, as a product; for references."""
        if self._each:
            return self._each[expert]
        one = self.weight[expert]
        return PackedLinear(one) if isinstance(one, Packed) else Linear(one, pack=False)

    def for_kernels(self) -> torch.Tensor | Laid:
        """As they are read by kernels."""
        weight = self.weight
        if isinstance(weight, Packed) and not weight.weight.is_cuda:
            return lay_out(weight)
        return weight


def run_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    first: int,
    limit: float,
    among: int | None = None,
) -> torch.Tensor:
    """This rank's experts' part of the output.

    Args:
        x: [T, H], float32, bfloat16 or float16.
        experts: [T, k] int64, different ones for each token.
        weights: [T, k] float32.
        gate_up: [E, 2I, H], gate over up.
        down: [E, H, I].
        first: Number of the first of these E experts.
        limit: c.
        among: Experts of all ranks; None: these alone.

    Returns:
        [T, H] in x's dtype.
    """
    dims = Dims()
    dims.check("x", x, "T H")
    dims.check("experts", experts, "T k", torch.int64)
    dims.check("weights", weights, "T k", torch.float32)
    if not len(gate_up):  # more ranks than experts
        return torch.zeros_like(x)
    if not x.is_cuda:
        return run_experts_ref(x, experts, weights, gate_up, down, first=first, limit=limit)
    return run_experts_triton(
        x, experts, weights, gate_up, down, first=first, limit=limit, among=among
    )


def run_experts_ref(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    first: int,
    limit: float,
) -> torch.Tensor:
    """`run_experts` in torch, an expert at a time: the definition kernels are held to."""
    parts = torch.zeros(*experts.shape, x.shape[1], dtype=torch.float32, device=x.device)
    held = experts - first
    for e in held.unique().tolist():
        if not 0 <= e < len(gate_up):
            continue
        token, place = (held == e).nonzero(as_tuple=True)
        out = down.of(e)(cut_silu(gate_up.of(e)(x[token]), limit))
        parts[token, place] = out.float() * weights[token, place, None]
    return parts.sum(dim=1).to(x.dtype)


def run_experts_triton(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    *,
    first: int,
    limit: float,
    among: int | None = None,
) -> torch.Tensor:
    """`run_experts` as two grouped products and a sum; nothing is read back by the host."""
    if not len(x):
        return torch.empty_like(x)
    per_token = experts.shape[1]
    plan = plan_tiles(experts - first, len(gate_up), among)
    inner = grouped_product(x.contiguous(), plan, gate_up.for_kernels(), rows_from=per_token)
    inner = cut_silu(inner, limit)
    out = grouped_product(inner, plan, down.for_kernels(), rows_from=0)
    return combine(out, plan, weights)
