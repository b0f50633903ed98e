"""Products of few rows: the kernel against its reference, and which matrices take it."""

from pathlib import Path

import pytest
import torch

from engine.kernels.activation import silu_mul_triton
from engine.kernels.few_rows import (
    BLOCK_N,
    FewRows,
    few_rows_of,
    few_rows_ref,
    few_rows_triton,
    parts_of,
)
from engine.kernels.linear import Linear
from tests.helpers.ahead import compiling
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton, summable

# the interpreter truncates to bfloat16 where a GPU rounds
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


def way_of(columns: int, parts: int) -> FewRows:
    tiles = -(-columns // BLOCK_N)
    return FewRows(parts, torch.zeros(tiles, dtype=torch.int32, device=KERNEL_DEVICE))


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 200), (16, 96), (15, 130)])
@pytest.mark.parametrize("biased", [False, True])
def test_products(rows: int, columns: int, parts: int, biased: bool, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 1024).to(KERNEL_DEVICE, dtype)
    weight = (torch.randn(columns, 1024) / 32).to(KERNEL_DEVICE, dtype)
    bias = torch.randn(columns).to(KERNEL_DEVICE, dtype) if biased else None
    exact = few_rows_ref(x.float(), weight.float(), None if bias is None else bias.float())
    way = way_of(columns, parts)
    for _ in range(2):  # counts are as they were
        out = few_rows_triton(x, weight, bias, way)
        assert_as_good_as(out, exact, few_rows_ref(x, weight, bias))
        assert not way.counts.any()


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 200), (16, 128), (13, 70)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gate_and_its_up(
    rows: int, columns: int, parts: int, biased: bool, dtype: torch.dtype
) -> None:
    """The bits of a product and an activation by themselves."""
    x = torch.randn(rows, 1024).to(KERNEL_DEVICE, dtype)
    weight = (torch.randn(columns, 1024) / 8).to(KERNEL_DEVICE, dtype)
    if INTERPRETED:
        x = summable(rows, 1024, dtype=dtype)
        weight = summable(columns, 1024, dtype=dtype, steps=128)
    bias = torch.randn(columns).to(KERNEL_DEVICE, dtype) if biased else None
    way = way_of(columns, parts)
    want = silu_mul_triton(few_rows_triton(x, weight, bias, way))
    for _ in range(2):
        out = few_rows_triton(x, weight, bias, way, gated=True)
        assert out.shape == (rows, columns // 2)
        assert torch.equal(out, want)
        assert not way.counts.any()


@needs_triton
def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x = torch.randn(16, 1024).to(KERNEL_DEVICE, torch.float16)
    weight = torch.randn(128, 1024).to(KERNEL_DEVICE, torch.float16)
    if INTERPRETED:
        x, weight = summable(16, 1024, dtype=x.dtype), summable(128, 1024, dtype=x.dtype)
    whole = few_rows_triton(x, weight, None, way_of(128, 4))
    for rows in (1, 3, 15):
        some = few_rows_triton(x[:rows], weight, None, way_of(128, 4))
        assert torch.equal(some, whole[:rows])


@needs_triton
def test_no_rows_and_too_many() -> None:
    weight = torch.zeros(64, 1024, dtype=torch.float16, device=KERNEL_DEVICE)
    x = weight.new_zeros(17, 1024)
    assert few_rows_triton(x[:0], weight, None, way_of(64, 2)).shape == (0, 64)
    with pytest.raises(ValueError, match="17 rows, at most 16"):
        few_rows_triton(x, weight, None, way_of(64, 2))
    with pytest.raises(ValueError, match="1024 inputs do not divide into 3 parts"):
        few_rows_triton(x[:1], weight, None, way_of(64, 3))


def test_parts_fill_a_gpu_and_divide_the_inputs() -> None:
    """Of Qwen3-8B whole and halved; heads, small models and vocabularies stay with torch."""
    shapes = {(6144, 4096): 2, (4096, 4096): 4, (24576, 4096): 1, (4096, 12288): 4}
    shapes |= {(3072, 4096): 4, (4096, 2048): 4, (12288, 4096): 1, (4096, 6144): 4}
    shapes |= {(151936, 4096): 0, (576, 576): 0, (1024, 4096): 0, (4096, 4096 + 64): 0}
    for (columns, width), parts in shapes.items():
        assert parts_of(-(-columns // BLOCK_N), width) == parts, (columns, width)


def test_a_cpu_has_no_use_for_it() -> None:
    assert few_rows_of(torch.empty(4096, 4096, dtype=torch.bfloat16)) is None


@pytest.mark.skipif(INTERPRETED, reason="compiles; the interpreter does not")
def test_the_sum_runs_on_tensor_cores_and_reads_ahead(tmp_path: Path) -> None:
    """Compiled for compute capability 9.0: fits, and each tile's loop has loads under way."""
    with compiling(tmp_path) as made:
        weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
        for rows in (8, 16):
            for gated in (False, True):
                few_rows_triton(weight[:rows], weight, None, way_of(4096, 4), gated=gated)
    kernels = made.kernels["_few_rows_kernel"]
    assert len(kernels) == 2
    for kernel in kernels:
        ptx = kernel.asm["ptx"]
        assert "wgmma.mma_async" in ptx
        assert "cp.async.cg" in ptx
        assert "griddepcontrol.wait" in ptx


@pytest.mark.gpu
def test_matrices_of_a_gpu_take_it_and_change_nothing_in_a_graph() -> None:
    matrix = Linear(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64)
    assert matrix.few is not None
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    eager = matrix(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            out = matrix(x)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, eager)
    exact = few_rows_ref(x.float(), matrix.weight.float())
    assert_as_good_as(eager, exact, few_rows_ref(x, matrix.weight))
    assert torch.equal(matrix.gated(x), silu_mul_triton(eager))
