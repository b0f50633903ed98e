"""DeepSeek-V4's ops at the sizes of its rounds: packed experts and matrices, streams, attention."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from engine.kernel_bench.case import Case, Inputs, as_good_as, equal, first
from engine.kernel_bench.layer_cases import randn
from engine.kernels.experts import run_experts, run_experts_ref
from engine.kernels.hc_collapse import hc_collapse, hc_collapse_ref
from engine.kernels.hc_mix import MixWeights, hc_mix, hc_mix_ref
from engine.kernels.hc_post import hc_post, hc_post_ref
from engine.kernels.packed import Packed
from engine.kernels.packed_linear import PackedLinear, packed_linear_ref
from engine.kernels.paged_attention import AttentionBatch, locate_kv
from engine.kernels.rolling import CompressedState, token_places
from engine.kernels.window_attention import window_attention, window_attention_ref
from engine.models.deepseek_v4_shapes import RandomV4
from engine.models.deepseek_v4_spec import V4Layers
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.layers import Placement

Make = tuple[str, Callable[[], Case]]


def deepseek_v4_cases(
    spec: V4Layers, requests: tuple[int, ...], context: int, width: int, at: Placement
) -> list[Make]:
    """Cases by op.

    Args:
        spec: The target's layers.
        requests: Batch sizes.
        context: KV tokens of each.
        width: Tokens of each in a round.
        at: Dtype and device.
    """
    cases: list[Make] = []
    rows = spec.num_heads * spec.head_dim
    low = spec.o_groups * spec.o_rank
    for n in requests:
        tokens = n * width
        cases += [
            ("experts", partial(experts_case, tokens, spec, at)),
            ("packed_linear", partial(packed_case, "wq_b", tokens, spec.q_rank, rows, at)),
            ("packed_linear", partial(packed_case, "wo_b", tokens, low, spec.hidden_size, at)),
            ("hc_mix", partial(mix_case, tokens, spec, at)),
            ("hc_post", partial(streams_case, tokens, spec, at, back=True)),
            ("hc_collapse", partial(streams_case, tokens, spec, at, back=False)),
            ("window_attention", partial(attention_case, n, context, width, spec, at)),
        ]
    return cases


def experts_case(tokens: int, spec: V4Layers, at: Placement) -> Case:
    """Inputs: x [T, H], experts and weights [T, k], and a layer's packed matrices."""
    e = spec.experts
    made = RandomV4(0)

    def make() -> Inputs:
        weights = V4Weights(made, made.has, at)
        gate_up, down = weights.experts(
            "layers.0.ffn.experts.", e.num_experts, e.width, spec.hidden_size, None
        )
        scores = torch.rand(tokens, e.num_experts, device=at.device)
        shares = torch.rand(tokens, e.per_token, device=at.device)
        chosen = scores.topk(e.per_token, dim=1).indices
        return randn(at, tokens, spec.hidden_size), chosen, shares, gate_up, down

    def run(inputs: Inputs) -> torch.Tensor:
        return run_experts(*inputs, first=0, limit=e.limit)

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        x, *rest = inputs
        exact = run_experts_ref(x.float(), *rest, first=0, limit=e.limit)
        low = run_experts_ref(x, *rest, first=0, limit=e.limit)
        return as_good_as("y", out, exact, low)

    touched = e.num_experts * (1 - (1 - e.per_token / e.num_experts) ** tokens)
    numbers = 3 * e.width * spec.hidden_size
    moved = 2 * tokens * (1 + e.per_token) * spec.hidden_size * at.dtype.itemsize
    return Case(
        op="experts",
        shape=f"{tokens} x {spec.hidden_size}, {touched:.0f} of {e.num_experts} experts, fp4",
        make=make,
        run=run,
        check=check,
        nbytes=touched * numbers * (0.5 + 1 / 32) + moved,
        flops=2.0 * tokens * e.per_token * numbers,
    )


def packed_case(name: str, tokens: int, inner: int, outer: int, at: Placement) -> Case:
    """Inputs: x [T, in] and an fp8 matrix."""
    made = RandomV4(0)

    def make() -> Inputs:
        weights = V4Weights(made, made.has, at)
        matrix = weights.matrix([f"layers.0.attn.{name}"], [outer], inner)
        assert isinstance(matrix, PackedLinear)
        return randn(at, tokens, inner), matrix

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        x, matrix = inputs
        packed: Packed = matrix.packed
        exact = packed_linear_ref(x.float(), packed)
        return as_good_as("y", out, exact, packed_linear_ref(x, packed))

    return Case(
        op="packed_linear",
        shape=f"{tokens} x {inner} x {outer} ({name}, fp8)",
        make=make,
        run=lambda inputs: inputs[1](inputs[0]),
        check=check,
        nbytes=inner * outer + tokens * (inner + outer) * at.dtype.itemsize,
        flops=2.0 * tokens * inner * outer,
    )


def mix_case(tokens: int, spec: V4Layers, at: Placement) -> Case:
    """Inputs: streams [T, S, H] and weights."""
    s, h, hyper = spec.hyper.num_streams, spec.hidden_size, spec.hyper
    how: dict[str, Any] = {"norm_eps": spec.norm_eps, "eps": hyper.eps}
    wide = Placement(torch.float32, at.device)

    def make() -> Inputs:
        rows = s * (s + 2)
        fn = randn(wide, rows, s * h, scale=(s * h) ** -0.5)
        return randn(at, tokens, s, h), MixWeights(fn, randn(wide, rows), randn(wide, 3))

    def check(inputs: Inputs, out: tuple[torch.Tensor, ...]) -> str | None:
        exact = hc_mix_ref(*inputs, **how, iterations=hyper.sinkhorn_iterations)
        for name, mine, want in zip(("pre", "post", "comb"), out, exact, strict=True):
            if float((mine - want).abs().max()) > 1e-4:
                return f"{name} is off by {float((mine - want).abs().max()):.3g}"
        return None

    return Case(
        op="hc_mix",
        shape=f"{tokens} x {s} x {h}",
        make=make,
        run=lambda inputs: hc_mix(*inputs, **how, iterations=hyper.sinkhorn_iterations),
        check=check,
        nbytes=tokens * s * h * at.dtype.itemsize + s * (s + 2) * s * h * 4,
    )


def streams_case(tokens: int, spec: V4Layers, at: Placement, *, back: bool) -> Case:
    """Inputs: y [T, H], streams [T, S, H], post [T, S], comb [T, S, S]; or streams and pre."""
    s, h = spec.hyper.num_streams, spec.hidden_size
    op, ref = (hc_post, hc_post_ref) if back else (hc_collapse, hc_collapse_ref)

    def make() -> Inputs:
        streams, shares = randn(at, tokens, s, h), torch.rand(tokens, s, device=at.device)
        if not back:
            return streams, shares
        comb = torch.rand(tokens, s, s, device=at.device)
        return randn(at, tokens, h), streams, shares, comb

    return Case(
        op="hc_post" if back else "hc_collapse",
        shape=f"{tokens} x {s} x {h}",
        make=make,
        run=lambda inputs: op(*inputs),
        check=lambda inputs, out: equal("streams", out, ref(*inputs)),  # bit for bit
        nbytes=tokens * h * (2 * s + 1 if back else s + 1) * at.dtype.itemsize,
    )


def attention_case(n: int, context: int, width: int, spec: V4Layers, at: Placement) -> Case:
    """Inputs: q, keys, sinks, a ring, the batch, positions, entries and those chosen."""
    ratios = [spec.ratio(i) for i in range(spec.num_layers)]
    # of the entries that are chosen, the closest ones
    ratio, d = min(filter(None, ratios)), spec.head_dim
    size = max(*ratios, 16)
    blocks = -(-(context + width) // size)
    top_k = min(spec.indexer.top_k, context // ratio)
    tokens, seen = n * width, min(context, spec.window)

    def make() -> Inputs:
        table = torch.arange(n * blocks, device=at.device).view(n, blocks)
        stop = context + width
        batch = AttentionBatch(
            block_table=table.int(),
            cu_seqlens_q=torch.arange(n + 1, device=at.device).mul(width).int(),
            seq_lens=torch.full((n,), stop, dtype=torch.int32, device=at.device),
            kv_block_size=size,
            query_lens=(width,) * n,
            kv_lens=(stop,) * n,
            kv_index=tuple(locate_kv(b, stop, size, at.device) for b in table.tolist()),
            rows=torch.arange(n, device=at.device),
        )
        positions = torch.arange(context, stop, device=at.device).repeat(n)
        entries = randn(at, n * blocks * size // ratio, d)
        state = CompressedState(torch.empty(0, device=at.device), entries, ratio)
        order = torch.rand(tokens, max(context // ratio, 1), device=at.device).argsort(dim=1)
        return (
            randn(at, tokens, spec.num_heads, d),
            randn(at, tokens, d),
            torch.zeros(spec.num_heads, device=at.device),
            randn(at, n + 1, spec.window + width, d),
            batch,
            positions,
            state,
            order[:, :top_k].int().contiguous(),
        )

    def run(inputs: Inputs) -> torch.Tensor:
        *given, positions, state, chosen = inputs
        where = token_places(given[4], tokens) if at.device.type == "cuda" else None
        more = {"compressed": state, "chosen": chosen, "positions": positions, "at": where}
        return window_attention(*given, window=spec.window, scale=d**-0.5, **more)

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        q, kv, sinks, ring, batch, _, state, chosen = inputs
        entries = CompressedState(state.rows, state.entries.float(), ratio)
        how = {"window": spec.window, "scale": d**-0.5, "chosen": chosen}
        # the op has put the step's keys into the ring already; they are the same ones
        exact = window_attention_ref(
            q.float(), kv.float(), sinks, ring.float(), batch, compressed=entries, **how
        )
        low = window_attention_ref(q, kv, sinks, ring.clone(), batch, compressed=state, **how)
        return first(as_good_as("out", out, exact, low))

    keys = n * (seen + width) + tokens * top_k
    return Case(
        op="window_attention",
        shape=f"{n} x {width} tokens, window {seen}, {top_k} entries",
        make=make,
        run=run,
        check=check,
        nbytes=(keys * d + 2 * tokens * spec.num_heads * d) * at.dtype.itemsize,
        flops=4.0 * tokens * (seen + top_k) * spec.num_heads * d,
    )
