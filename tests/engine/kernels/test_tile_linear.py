"""Products in even tiles: the kernel against its reference, and what takes it when."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import linear, tile_linear
from engine.kernels.activation import silu_mul, silu_mul_triton
from engine.kernels.linear import Linear
from engine.kernels.tile_linear import (
    Tiles,
    choose_tiles,
    fits,
    takes_tiles,
    tile_linear_ref,
    tile_linear_triton,
)
from tests.helpers.ahead import compiling
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton, summable

# the interpreter truncates to bfloat16 where a GPU rounds
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
SMS = 132
CHOSEN = {
    "gate and up, 64 rows": (choose_tiles(64, 12288, SMS, gated=True), True),
    "gate and up, 128 rows": (choose_tiles(128, 12288, SMS, gated=True), True),
    "half of gate and up, 64 rows": (choose_tiles(64, 6144, SMS, gated=True), True),
    "q, k and v, 64 rows": (choose_tiles(64, 6144, SMS, gated=False), False),
    "o, 64 rows": (choose_tiles(64, 4096, SMS, gated=False), False),
}


def tiles_of(name: str) -> tuple[Tiles, bool]:
    tiles, gated = CHOSEN[name]
    assert tiles is not None
    return tiles, gated


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (50, 272), (64, 96)])
@pytest.mark.parametrize("width", [64, 200])
def test_products(name: str, rows: int, columns: int, width: int, dtype: torch.dtype) -> None:
    """Rows, outputs and inputs that tiles divide and do not."""
    tiles, gated = tiles_of(name)
    x = torch.randn(rows, width).to(KERNEL_DEVICE, dtype)
    weight = (2 * torch.randn((1 + gated) * columns, width) / width**0.5).to(KERNEL_DEVICE, dtype)
    out = tile_linear_triton(x, weight, tiles, gated=gated)
    assert out.shape == (rows, columns)
    exact = tile_linear_ref(x.float(), weight.float(), gated=gated)
    assert_as_good_as(out, exact, tile_linear_ref(x, weight, gated=gated))


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHOSEN)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 64),
    columns=st.integers(1, 17).map(lambda n: 16 * n),
    seed=st.integers(0, 9),
)
def test_rounds_as_a_product_and_an_activation_by_themselves(
    dtype: torch.dtype, name: str, rows: int, columns: int, seed: int
) -> None:
    """Sums that float32 holds in any order and the dtype does not: the bits are the same."""
    tiles, gated = tiles_of(name)
    torch.manual_seed(seed)
    x = summable(rows, 128, dtype=dtype)
    weight = summable((1 + gated) * columns, 128, dtype=dtype, steps=128)
    product = torch.nn.functional.linear(x.float(), weight.float()).to(dtype)
    out = tile_linear_triton(x, weight, tiles, gated=gated)
    assert torch.equal(out, silu_mul_triton(product) if gated else product)


@needs_triton
@pytest.mark.parametrize("name", CHOSEN)
def test_a_row_has_the_same_bits_beside_any_others(name: str) -> None:
    tiles, gated = tiles_of(name)
    x = torch.randn(tiles.rows, 256).to(KERNEL_DEVICE, torch.float16)
    weight = torch.randn(256, 256).to(KERNEL_DEVICE, torch.float16) / 16
    if INTERPRETED:
        x = summable(tiles.rows, 256, dtype=x.dtype)
        weight = summable(256, 256, dtype=x.dtype, steps=128)
    whole = tile_linear_triton(x, weight, tiles, gated=gated)
    for first, rows in ((0, 1), (3, 40), (tiles.rows - 30, 30)):
        some = tile_linear_triton(x[first : first + rows], weight, tiles, gated=gated)
        assert torch.equal(some, whole[first : first + rows])


@needs_triton
def test_no_rows_and_what_does_not_fit() -> None:
    weight = torch.zeros(64, 128, dtype=torch.float16, device=KERNEL_DEVICE)
    x, tiles = weight.new_zeros(3, 128), Tiles(64, 32, 0, 64, 4, 4)
    assert tile_linear_triton(x[:0], weight, tiles).shape == (0, 64)
    assert tile_linear_triton(x[:0], weight, tiles, gated=True).shape == (0, 32)
    with pytest.raises(ValueError, match="weight: expected"):
        tile_linear_triton(x[:, :64], weight, tiles)
    with pytest.raises(ValueError, match="do not begin at 16 bytes"):
        tile_linear_triton(x[:, :100].contiguous(), weight[:, :100].contiguous(), tiles)
    with pytest.raises(ValueError, match="65 rows, at most 64 can be"):
        tile_linear_triton(weight.new_zeros(65, 128), weight, tiles)


def test_what_fits() -> None:
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    assert fits(weight)
    assert fits(weight[8:40])
    assert not fits(weight[:, 8:])  # rows are not side by side
    assert not fits(weight[:24])  # rows of 12 outputs
    assert not fits(weight.view(-1)[4 : 4 + 32 * 128].view(32, 128))  # begins between
    assert not fits(torch.zeros(64, 100, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("columns", "gated", "rows"),
    [
        (12288, True, {17, 32, 33, 64, 65, 128}),  # gate and up of Qwen3-8B
        (6144, False, {33, 64}),  # its q, k and v, 128 tiles of 48
        (4096, False, {33, 64}),  # o and down
        (3072, False, set()),  # half of q, k and v
        (6144, True, {17, 32, 33, 64, 65, 128}),  # half of gate and up
        (151936, False, set()),  # a vocabulary
        (1536, True, set()),  # of SmolLM2: too few tiles
    ],
)
def test_rows_whose_tiles_fill_the_device(columns: int, gated: bool, rows: set[int]) -> None:
    asked = (1, 16, 17, 32, 33, 64, 65, 128, 129, 512)
    assert {n for n in asked if choose_tiles(n, columns, SMS, gated=gated)} == rows


@given(
    rows=st.integers(1, 4096),
    columns=st.integers(1, 4096).map(lambda n: 16 * n),
    processors=st.integers(1, 200),
    gated=st.booleans(),
)
def test_tiles_fit_into_shared_memory_and_few_processors_idle(
    rows: int, columns: int, processors: int, gated: bool
) -> None:
    tiles = choose_tiles(rows, columns, processors, gated=gated)
    if tiles is None:
        return
    wide = tiles.columns + tiles.more
    inputs = (tiles.rows + (1 + gated) * wide) * tiles.inputs * 2 * tiles.stages
    outputs = tiles.rows * wide * 2
    assert inputs + outputs + 1024 <= tile_linear._SHARED
    assert tiles.stages >= 3
    assert rows <= tiles.rows
    assert 0.9 * processors <= -(-columns // wide) <= processors


def test_a_cpu_has_no_use_for_it() -> None:
    assert not takes_tiles(torch.empty(24576, 4096, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("differs", "taken"),
    [
        ({}, True),
        ({"bias": True}, False),
        ({"dtype": torch.float32}, False),
        ({"shared": 99 << 10}, False),
        ({"capable": False}, False),
    ],
)
def test_which_matrices_take_it(
    differs: dict[str, object], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: 16-bit values, no bias, and a device with such launches and shared memory."""
    asked = {"bias": False, "dtype": torch.bfloat16, "shared": 227 << 10, "capable": True}
    asked |= differs
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(tile_linear.launch, "capable", lambda _: asked["capable"])
    monkeypatch.setattr(tile_linear.launch, "shared_memory", lambda _: asked["shared"])
    weight = torch.empty(512, 256, dtype=asked["dtype"])  # type: ignore[call-overload]
    assert takes_tiles(weight, weight[:, 0] if asked["bias"] else None) is taken


def test_the_way_at_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def own(
        x: torch.Tensor, weight: torch.Tensor, _: Tiles, *, gated: bool = False
    ) -> torch.Tensor:
        calls.append("in one" if gated else "own")
        return tile_linear_ref(x, weight, gated=gated)

    def activation(gate_up: torch.Tensor) -> torch.Tensor:
        calls.append("activation")
        return silu_mul(gate_up)

    monkeypatch.setattr(linear, "tile_linear_triton", own)
    monkeypatch.setattr(linear, "silu_mul", activation)
    monkeypatch.setattr(linear, "multiprocessors", lambda _: SMS)
    matrix = Linear(torch.randn(2 * 4096, 8), pack=False)
    for tiled in (True, False):
        matrix.tiled = tiled
        for rows in (16, 64, 128):
            assert matrix.gated(torch.randn(rows, 8)).shape == (rows, 4096)
    assert calls == ["activation", "in one", "in one", *["activation"] * 3]
    calls.clear()
    square = Linear(torch.randn(4096, 8), pack=False)
    square.tiled = True
    for rows, own_product in ((16, False), (32, False), (33, True), (64, True), (65, False)):
        square(torch.randn(rows, 8))
        assert square.multiplies(rows) is own_product
    assert calls == ["own", "own"]


@pytest.mark.skipif(INTERPRETED, reason="compiles; the interpreter does not")
@pytest.mark.parametrize("name", CHOSEN)
def test_compiled_it_fits_spills_nothing_and_copies_ahead(name: str, tmp_path: Path) -> None:
    """For compute capability 9.0; gate and up, side by side, are one instruction's."""
    tiles, gated = tiles_of(name)
    with compiling(tmp_path) as made:
        weight = torch.zeros(24576, 4096, dtype=torch.bfloat16)
        for rows in (64, 63):
            tile_linear_triton(weight[:rows], weight, tiles, gated=gated)
    (kernel,) = made.kernels["_tile_linear_kernel"]  # one for any number of rows
    ptx = kernel.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n{(1 + gated) * tiles.columns}k16" in ptx
    waits = {int(n) for n in re.findall(r"wgmma.wait_group.sync.aligned\s+(\d+);", ptx)}
    assert max(waits) > 0  # one is always under way
    assert "cp.async.bulk.tensor.3d" in ptx
    assert "griddepcontrol.wait" in ptx
    assert kernel.metadata.shared <= tile_linear._SHARED
    code = made.machine_code("_tile_linear_kernel")
    assert "STL" not in code
    assert "LDL" not in code


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 64, 100, 128])
def test_a_gpu_takes_it_and_a_graph_changes_nothing(rows: int) -> None:
    matrix = Linear(torch.randn(24576, 4096, device="cuda", dtype=torch.bfloat16) / 64)
    assert matrix.tiles(rows, gated=True) is not None
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    check_on_a_gpu(matrix, x, gated=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, 64])
def test_a_gpu_takes_products_alone(rows: int) -> None:
    matrix = Linear(torch.randn(4096, 12288, device="cuda", dtype=torch.bfloat16) / 64)
    assert matrix.multiplies(rows)
    check_on_a_gpu(
        matrix, torch.randn(rows, 12288, device="cuda", dtype=torch.bfloat16), gated=False
    )


def check_on_a_gpu(matrix: Linear, x: torch.Tensor, *, gated: bool) -> None:
    run = matrix.gated if gated else matrix
    eager = run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            out = run(x)
    for _ in range(4):
        out.zero_()
        graph.replay()
        assert torch.equal(out, eager)
    exact = tile_linear_ref(x.float(), matrix.weight.float(), gated=gated)
    assert_as_good_as(eager, exact, tile_linear_ref(x, matrix.weight, gated=gated))
