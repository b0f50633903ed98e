"""What a layer does besides attention, for T tokens."""

import torch
from torch.nn.functional import linear

from engine.kernel_bench.case import Case, Inputs, as_good_as, equal, first
from engine.kernels.activation import silu_mul, silu_mul_ref
from engine.kernels.linear import Linear
from engine.kernels.norms import add_rms_norm, rms_norm_ref
from engine.kernels.rope import inverse_frequencies, rope_table
from engine.kernels.rope_product import Turn, rope_product
from engine.kernels.rope_store import rope_store, rope_store_ref
from engine.models.config import LayersSpec
from engine.models.layers import Placement

_EPS = 1e-6


def randn(at: Placement, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random values of that shape where the networks would be."""
    return torch.empty(shape, dtype=at.dtype, device=at.device).normal_(0.0, scale)


def linear_case(name: str, tokens: int, inner: int, outer: int, at: Placement) -> Case:
    """Inputs: x [T, in], the plain weight [out, in], and the matrix as the networks hold it."""

    def make() -> Inputs:
        weight = randn(at, outer, inner, scale=inner**-0.5)
        return randn(at, tokens, inner), weight, Linear(weight)

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        x, weight, _ = inputs
        return as_good_as("y", out, linear(x.float(), weight.float()), linear(x, weight))

    item = at.dtype.itemsize
    return Case(
        op="linear",
        shape=f"{tokens} x {inner} x {outer} ({name})",
        make=make,
        run=lambda inputs: inputs[2](inputs[0]),
        check=check,
        nbytes=(inner * outer + tokens * (inner + outer)) * item,
        flops=2.0 * tokens * inner * outer,
    )


def gated_case(tokens: int, spec: LayersSpec, at: Placement) -> Case:
    """Inputs: x [T, H], the plain weight [2I, H], and the matrix as the networks hold it."""
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def make() -> Inputs:
        weight = randn(at, 2 * inner, hidden, scale=hidden**-0.5)
        return randn(at, tokens, hidden), weight, Linear(weight)

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        x, weight, _ = inputs
        exact = silu_mul_ref(linear(x.float(), weight.float()))
        return as_good_as("y", out, exact, silu_mul_ref(linear(x, weight)))

    return Case(
        op="gated_linear",
        shape=f"{tokens} x {hidden} x 2 x {inner}",
        make=make,
        run=lambda inputs: inputs[2].gated(inputs[0]),
        check=check,
        nbytes=(2 * hidden * inner + tokens * (hidden + inner)) * at.dtype.itemsize,
        flops=4.0 * tokens * hidden * inner,
    )


def norm_case(tokens: int, spec: LayersSpec, at: Placement) -> Case:
    """Inputs: x and residual [T, H], weight [H]."""
    hidden = spec.hidden_size

    def run(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = inputs
        return add_rms_norm(x, residual, weight, _EPS)

    def check(inputs: Inputs, out: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        (x, residual, weight), (normed, total) = inputs, out
        exact = rms_norm_ref(total.float(), weight.float(), _EPS)
        return first(
            equal("sum", total, x + residual),
            as_good_as("norm", normed, exact, rms_norm_ref(total, weight, _EPS)),
        )

    return Case(
        op="add_rms_norm",
        shape=f"{tokens} x {hidden}",
        make=lambda: (randn(at, tokens, hidden), randn(at, tokens, hidden), randn(at, hidden)),
        run=run,
        check=check,
        nbytes=4 * tokens * hidden * at.dtype.itemsize,
    )


def activation_case(tokens: int, spec: LayersSpec, at: Placement) -> Case:
    """Inputs: gate_up [T, 2I]."""
    width = spec.intermediate_size

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        (x,) = inputs
        return as_good_as("out", out, silu_mul_ref(x.float()), silu_mul_ref(x))

    return Case(
        op="silu_mul",
        shape=f"{tokens} x {width}",
        make=lambda: (randn(at, tokens, 2 * width),),
        run=lambda inputs: silu_mul(*inputs),
        check=check,
        nbytes=3 * tokens * width * at.dtype.itemsize,
    )


def rope_product_case(tokens: int, spec: LayersSpec, at: Placement) -> Case:
    """Inputs: x [T, H], the plain weight, the matrix, and a `Turn` of slots in random order."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    hidden, outer = spec.hidden_size, (heads + 2 * kv_heads) * dim

    def make() -> Inputs:
        weight = randn(at, outer, hidden, scale=hidden**-0.5)
        return randn(at, tokens, hidden), weight, Linear(weight), _turn(tokens, spec, at)

    def check(inputs: Inputs, q: torch.Tensor) -> str | None:
        x, weight, _, turn = inputs

        def reference(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            qkv = linear(x.to(dtype), weight.to(dtype)).view(tokens, -1, dim)
            return _stored(qkv, turn)

        got = (q, turn.k_cache[turn.slots], turn.v_cache[turn.slots])
        return first(*map(as_good_as, _STORED, got, reference(torch.float32), reference(at.dtype)))

    moved = hidden * outer + tokens * (hidden + outer)
    return Case(
        op="rope_product",
        shape=f"{tokens} x {hidden} x {outer}",
        make=make,
        run=lambda inputs: rope_product(inputs[0], *inputs[2:]),
        check=check,
        nbytes=moved * at.dtype.itemsize + tokens * (4 * dim + 8),
        flops=2.0 * tokens * hidden * outer,
    )


def rope_store_case(tokens: int, spec: LayersSpec, at: Placement) -> Case:
    """Inputs: qkv [T, Q+2K, D], and a `Turn` of slots in random order."""
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim

    def check(inputs: Inputs, q: torch.Tensor) -> str | None:
        qkv, turn = inputs
        got = (q, turn.k_cache[turn.slots], turn.v_cache[turn.slots])
        return first(*map(as_good_as, _STORED, got, _stored(qkv.float(), turn), _stored(qkv, turn)))

    moved = 2 * tokens * (heads + 2 * kv_heads) * dim * at.dtype.itemsize
    return Case(
        op="rope_store",
        shape=f"{tokens} x {heads + 2 * kv_heads} x {dim}",
        make=lambda: (
            randn(at, tokens, heads + 2 * kv_heads, dim),
            _turn(tokens, spec, at),
        ),
        run=lambda inputs: rope_store(inputs[0], *inputs[1]),
        check=check,
        nbytes=moved + tokens * (4 * dim + 8),
    )


_STORED = ("q", "stored k", "stored v")


def _turn(tokens: int, spec: LayersSpec, at: Placement) -> Turn:
    """Norm weights or None, angles of positions 0 to T, and a cache."""
    dim, slots = spec.head_dim, max(2 * tokens, 4096)
    return Turn(
        randn(at, dim) if spec.qk_norm else None,
        randn(at, dim) if spec.qk_norm else None,
        _EPS,
        rope_table(inverse_frequencies(dim, spec.rope.theta), tokens).to(at.device),
        randn(at, slots, spec.num_kv_heads, dim),
        randn(at, slots, spec.num_kv_heads, dim),
        torch.randperm(slots, device=at.device)[:tokens],
    )


def _stored(qkv: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, ...]:
    """What the reference makes of q, k and v, in qkv's dtype."""
    turn = turn._replace(
        q_weight=None if turn.q_weight is None else turn.q_weight.to(qkv.dtype),
        k_weight=None if turn.k_weight is None else turn.k_weight.to(qkv.dtype),
        k_cache=torch.zeros_like(turn.k_cache, dtype=qkv.dtype),
        v_cache=torch.zeros_like(turn.v_cache, dtype=qkv.dtype),
    )
    return rope_store_ref(qkv, *turn), turn.k_cache[turn.slots], turn.v_cache[turn.slots]
