"""Norms, gated activation, step inputs: kernels against their references."""

import pytest
import torch

from engine.kernels.activation import silu_mul_ref, silu_mul_triton
from engine.kernels.contract import PAD_SLOT
from engine.kernels.norms import (
    add_rms_norm,
    add_rms_norm_ref,
    add_rms_norm_triton,
    rms_norm_ref,
    rms_norm_triton,
)
from engine.kernels.slot_mapping import slot_mapping_ref, slot_mapping_triton
from engine.kernels.step_inputs import step_inputs, step_inputs_ref, step_inputs_triton
from engine.kernels.write_blocks import write_blocks, write_blocks_ref, write_blocks_triton
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

# the interpreter truncates to bfloat16 where a GPU rounds: twice the error and more
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
pytestmark = pytest.mark.usefixtures("poison")


def held(actual: torch.Tensor, exact: torch.Tensor, low: torch.Tensor) -> None:
    """float32: the reference up to the order of its sums. Below: twice the reference's error."""
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, low, rtol=4e-6, atol=1e-6)
    else:
        assert_as_good_as(actual, exact, low)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(KERNEL_DEVICE, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(3, 4096), (2, 576), (1, 8192), (17, 100), (5, 3, 32), (2, 9, 80)]
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = 3 * randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    exact = rms_norm_ref(x.float(), weight.float(), 1e-5)
    held(rms_norm_triton(x, weight, 1e-5), exact, rms_norm_ref(x, weight, 1e-5))


@needs_triton
def test_rms_norm_of_heads_inside_a_wider_row() -> None:
    wide, weight = randn(7, 6, 64, dtype=torch.float32), randn(64, dtype=torch.float32)
    x = wide[:, 1:4]
    out = rms_norm_triton(x, weight, 1e-6)
    assert out.is_contiguous()
    torch.testing.assert_close(out, rms_norm_ref(x, weight, 1e-6))
    column = randn(5, 32, dtype=torch.float32).t()
    torch.testing.assert_close(
        rms_norm_triton(column, weight[:5], 1e-6), rms_norm_ref(column, weight[:5], 1e-6)
    )


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (3, 1000)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide = randn(shape[0], 2 * shape[1], dtype=dtype)
    x, residual, weight = (
        wide[:, : shape[1]],
        randn(*shape, dtype=dtype),
        randn(shape[1], dtype=dtype),
    )
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    held(
        normed,
        rms_norm_ref(total.float(), weight.float(), 1e-5),
        add_rms_norm_ref(x, residual, weight, 1e-5)[0],
    )


def test_add_rms_norm_is_the_sum_and_its_norm() -> None:
    x, residual, weight = torch.randn(2, 10), torch.randn(2, 10), torch.randn(10)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm_ref(total, weight, 1e-5))
    with pytest.raises(ValueError, match=r"residual: expected \[T H\]"):
        add_rms_norm(x, residual[:1], weight, 1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2048), (5, 1536), (3, 77)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens, width = shape
    x = (4 * randn(tokens, 2 * width + 3, dtype=dtype))[:, : 2 * width]
    held(silu_mul_triton(x), silu_mul_ref(x.float()), silu_mul_ref(x))


def step(lens: list[int], width: int) -> tuple[torch.Tensor, ...]:
    n = len(lens)
    return (
        torch.randint(0, 10**6, (n,)).to(KERNEL_DEVICE),
        torch.randint(0, 10**6, (n, width)).to(KERNEL_DEVICE),
        torch.randint(0, 10**5, (n,)).to(KERNEL_DEVICE),
        torch.tensor(lens, dtype=torch.int32, device=KERNEL_DEVICE),
    )


@needs_triton
@pytest.mark.parametrize(
    ("lens", "width"), [([1], 0), ([8] * 17, 7), ([3, 0, 1, 0, 5, 0], 4), ([0, 0, 2], 2)]
)
@pytest.mark.parametrize("padding", [0, 1, 600])
def test_step_inputs(lens: list[int], width: int, padding: int) -> None:
    args = step(lens, width)
    got = step_inputs_triton(*args, sum(lens) + padding)
    want = step_inputs_ref(*args, sum(lens) + padding)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0)


def test_padding_of_a_step_has_id_0_and_position_0() -> None:
    out = step_inputs(
        torch.tensor([50, 70, 60]),
        torch.tensor([[51, 52], [7, 7], [61, 62]]),
        torch.tensor([4, 8, 9]),
        torch.tensor([2, 0, 1], dtype=torch.int32),
        5,
    )
    assert out.token_ids.tolist() == [50, 51, 60, 0, 0]
    assert out.positions.tolist() == [4, 5, 9, 0, 0]
    assert out.cu_seqlens_q.tolist() == [0, 2, 2, 3]


@needs_triton
def test_a_padded_step_has_no_slots_in_its_padding() -> None:
    anchors, following, starts, lens = step([3, 0, 2, 0], 2)
    inputs = step_inputs_triton(anchors, following, starts % 40, lens, 11)
    table = torch.randint(0, 999, (4, 8), dtype=torch.int32).to(KERNEL_DEVICE)
    slots = slot_mapping_triton(table, inputs.positions, inputs.cu_seqlens_q, 16)
    want = slot_mapping_ref(table, inputs.positions, inputs.cu_seqlens_q, 16)
    torch.testing.assert_close(slots, want, rtol=0, atol=0)
    assert slots[5:].tolist() == [PAD_SLOT] * 6


@needs_triton
@pytest.mark.parametrize("count", [0, 1, 128, 300])
def test_new_blocks_go_where_they_belong_and_nowhere_else(count: int) -> None:
    places = torch.randperm(20 * 16)[:count]
    blocks = torch.randint(0, 1 << 20, (count,))
    entries = torch.stack((places // 16, places % 16, blocks), dim=1).to(KERNEL_DEVICE)
    table = torch.full((20, 16), -7, dtype=torch.int32, device=KERNEL_DEVICE)
    want = table.clone()
    write_blocks_ref(want, entries)
    write_blocks_triton(table, entries)
    assert torch.equal(table, want)
    assert int((table != -7).sum()) == count
    for some in (0, count // 2, count):  # as many as the device says
        table.fill_(-7)
        write_blocks_triton(table, entries, torch.tensor([some], device=KERNEL_DEVICE))
        want.fill_(-7)
        write_blocks_ref(want, entries[:some])
        assert torch.equal(table, want)
        write_blocks_ref(want.fill_(-7), entries, torch.tensor([some]))
        assert torch.equal(table, want)
    with pytest.raises(ValueError, match="entries"):
        write_blocks(table, entries.int())
