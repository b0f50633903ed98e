"""Every op runs inside a CUDA graph: whatever waited for the GPU would fail the capture."""

from collections.abc import Callable

import pytest
import torch

from engine.kernels.activation import silu_mul
from engine.kernels.linear import Linear
from engine.kernels.markov import markov_chain
from engine.kernels.norms import add_rms_norm, rms_norm
from engine.kernels.paged_attention_triton import paged_attention_triton
from engine.kernels.rope_product import Turn, rope_product
from engine.kernels.rope_store import rope_store
from engine.kernels.sampling import sample
from engine.kernels.slot_mapping import slot_mapping
from engine.kernels.step_inputs import step_inputs
from tests.engine.kernels.test_markov_kernels import Case

pytestmark = pytest.mark.gpu


def replayed(run: Callable[[], list[torch.Tensor]]) -> None:
    """Eager and replayed results are equal, also after the outputs were overwritten."""
    eager = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for x in out:
        x.zero_()
    graph.replay()
    for a, b in zip(eager, out, strict=True):
        assert torch.equal(a, b)


def test_layer_ops() -> None:
    x, w = torch.randn(5, 64, device="cuda"), torch.randn(64, device="cuda")
    heads, angles = torch.randn(5, 4, 64, device="cuda"), torch.randn(5, 2, 32, device="cuda")
    caches, slots = torch.zeros(2, 9, 1, 64, device="cuda"), torch.arange(5, device="cuda")
    lens = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
    ids = torch.randint(0, 9, (3, 4), device="cuda")
    table = torch.zeros(3, 4, dtype=torch.int32, device="cuda")

    def run() -> list[torch.Tensor]:
        inputs = step_inputs(ids[:, 0], ids[:, 1:], ids[:, 1], lens, 8)
        return [
            rms_norm(x, w, 1e-5),
            *add_rms_norm(x, x, w, 1e-5),
            rope_store(heads, w, w, 1e-5, angles, caches[0], caches[1], slots),
            silu_mul(x),
            *inputs,
            slot_mapping(table, inputs.positions, inputs.cu_seqlens_q, 16),
        ]

    replayed(run)


def test_a_product_that_stores_and_attention_behind_it() -> None:
    """Counts and caches are as they were for each replay; attention sees what was just stored."""
    heads, kv, dim, rows = 16, 4, 128, 6
    weight = torch.randn((heads + 2 * kv) * dim, 1024, device="cuda", dtype=torch.bfloat16) / 32
    matrix = Linear(weight)
    assert matrix.takes_few(rows)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    norm = torch.randn(dim, device="cuda", dtype=torch.bfloat16)
    caches = torch.randn(2, 64, kv, dim, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(40, 40 + rows, device="cuda")
    turn = Turn(norm, norm, 1e-6, torch.rand(rows, 2, dim // 2, device="cuda"), *caches, slots)
    table = torch.arange(4, dtype=torch.int32, device="cuda")[None]
    ends = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    lens = torch.tensor([40 + rows], dtype=torch.int32, device="cuda")

    def run() -> list[torch.Tensor]:
        q = rope_product(x, matrix, turn)
        out = paged_attention_triton(
            q, *caches, table, ends, lens, kv_block_size=16, max_query_len=rows, scale=0.1
        )
        return [q, out]

    replayed(run)
    stored = caches.clone()
    caches[:, slots] = float("nan")
    want = run()
    assert torch.equal(caches, stored)
    assert all(bool(o.isfinite().all()) for o in want)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_chain_and_sampling(kind: str, sampled: bool) -> None:
    case = Case(kind, 5, 300, 20, torch.bfloat16)

    def run() -> list[torch.Tensor]:
        chain = markov_chain(*case.args(), sampled=sampled)  # type: ignore[arg-type]
        own = sample(case.base[:, 0], case.params, case.positions, sampled=sampled)
        return [chain.token_ids, own]

    replayed(run)
