"""FP8 and FP4 weights: bits to numbers by the book, products against unpacked ones."""

import math

import pytest
import torch

from engine.kernels.packed import FP8_BLOCK, Packed, PackedKind, check_packed, e8m0, pack, unpack
from engine.kernels.packed_layout import lay_out
from engine.kernels.packed_linear import (
    PackedGroups,
    PackedLinear,
    packed_groups_triton,
    packed_linear,
    packed_linear_ref,
    packed_linear_triton,
)
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

# the interpreter truncates to bfloat16 where a GPU rounds
LOW = torch.float16 if INTERPRETED else torch.bfloat16
pytestmark = pytest.mark.usefixtures("poison")


def made(kind: str, *shape: int) -> Packed:
    """Random weights of "fp8", "fp8 float", "fp8 by 32" or "fp4"."""
    block = 32 if "32" in kind else FP8_BLOCK
    plain = torch.randn(shape)
    return pack(plain, kind[:3], float_scale="float" in kind, block=block)  # type: ignore[arg-type]


def on_device(packed: Packed) -> Packed:
    weight, scale = packed.weight.to(KERNEL_DEVICE), packed.scale.to(KERNEL_DEVICE)
    return Packed(packed.kind, weight, scale, packed.block)


def test_every_e8m0_byte_is_its_power_of_two() -> None:
    found = e8m0(torch.arange(256, dtype=torch.uint8))
    assert [float(v) for v in found[:255]] == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(float(found[255]))


def test_the_lower_half_of_a_byte_comes_first() -> None:
    """Sixteen codes: 0 to 6 and their negatives; a scale of 2^-3 for each 32 inputs."""
    codes = torch.arange(32) % 16
    byte = (codes[::2] | (codes[1::2] << 4)).to(torch.uint8)[None]
    one = Packed("fp4", byte, torch.tensor([[124]], dtype=torch.uint8))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    want = [v / 8 for v in [*magnitudes, *(-m for m in magnitudes)]] * 2
    assert unpack(one)[0].tolist() == want


@pytest.mark.parametrize("size", [128, 32])
def test_blocks_have_a_scale_each(size: int) -> None:
    """Rows and columns that do not fill the last block."""
    weight = torch.ones(size + 2, 2 * size - 7).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [126, 129]], dtype=torch.uint8)
    packed = Packed("fp8", weight, scale, size)
    check_packed(packed)
    found = unpack(packed)
    assert found[size - 1, size - 1] == 1.0
    assert found[size - 1, size] == 2.0
    assert found[size, size - 1] == 0.5
    assert found[size + 1, 2 * size - 8] == 4.0
    same = unpack(Packed("fp8", weight, e8m0(scale), size))
    assert torch.equal(found, same)
    with pytest.raises(ValueError, match="scale: expected"):
        check_packed(Packed("fp8", weight, scale, size * 2 + 5))


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_packing_what_is_unpacked_changes_nothing(kind: PackedKind) -> None:
    packed = pack(torch.randn(3, 150, 160), kind)
    check_packed(packed)
    again = pack(unpack(packed), kind)
    assert torch.equal(unpack(again), unpack(packed))
    error = unpack(packed[1]) - unpack(pack(unpack(packed[1]), kind))
    assert not error.any()


def test_packing_is_as_close_as_the_format() -> None:
    x = torch.randn(256, 256)
    for kind, floats, most in (("fp8", False, 0.04), ("fp8", True, 0.04), ("fp4", False, 0.2)):
        found = unpack(pack(x, kind, float_scale=floats))  # type: ignore[arg-type]
        assert (found - x).norm() / x.norm() < most
    x[:32, 32:64] *= 2.0**20  # blocks of 32 keep large numbers to themselves
    error = (unpack(pack(x, "fp8", block=32)) - x).abs()[32:].norm() / x[32:].norm()
    assert error < 0.04 < (unpack(pack(x, "fp8")) - x)[32:128].norm() / x[32:128].norm()


@needs_triton
@pytest.mark.parametrize("kind", ["fp8", "fp8 float", "fp8 by 32", "fp4"])
@pytest.mark.parametrize(("rows", "shape"), [(1, (130, 256)), (19, (64, 160)), (40, (72, 96))])
def test_products(rows: int, shape: tuple[int, int], kind: str) -> None:
    packed = on_device(made(kind, *shape))
    x = torch.randn(rows, shape[1], device=KERNEL_DEVICE)
    want = packed_linear_ref(x, packed)
    torch.testing.assert_close(packed_linear_triton(x, lay_out(packed)), want, atol=2e-4, rtol=1e-5)
    low = x.to(LOW)
    exact, rounded = packed_linear_ref(low.float(), packed), packed_linear_ref(low, packed)
    assert_as_good_as(packed_linear_triton(low, lay_out(packed)), exact, rounded)


@needs_triton
@pytest.mark.parametrize("kind", ["fp8", "fp8 by 32", "fp4"])
def test_parts_of_a_sum(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of their own, or one after another: the same bits."""
    packed = made(kind, 72, 512)
    laid = lay_out(on_device(packed))
    x = torch.randn(19, 512, device=KERNEL_DEVICE)
    want = x @ unpack(packed).t().to(KERNEL_DEVICE)
    for num_parts in (2, 4):
        apart = packed_linear_triton(x, laid, num_parts=num_parts)
        torch.testing.assert_close(apart, want, atol=2e-4, rtol=1e-5)
        with monkeypatch.context() as patch:
            patch.setattr("engine.kernels.packed_linear._ENOUGH", 0)
            together = packed_linear_triton(x, laid, num_parts=num_parts)
        torch.testing.assert_close(together, apart, atol=0, rtol=0)


@needs_triton
@pytest.mark.parametrize("kind", ["fp8", "fp8 by 32"])
def test_groups_of_inputs_have_a_matrix_each(kind: str) -> None:
    many = [made(kind, 40, 160) for _ in range(3)]
    x = torch.randn(21, 3, 160)
    want = PackedGroups(many)(x)
    parts = (torch.stack([getattr(m, n) for m in many]) for n in ("weight", "scale"))
    laid = on_device(Packed("fp8", *parts, many[0].block))
    got = packed_groups_triton(x.to(KERNEL_DEVICE), laid)
    torch.testing.assert_close(got.cpu(), want, atol=2e-4, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("kind", ["fp8", "fp8 by 32", "fp4"])
def test_rows_have_the_same_bits_in_any_batch(kind: str) -> None:
    """Tiles of other sizes add in the same order."""
    packed = on_device(made(kind, 96, 320))
    x = torch.randn(70, 320, device=KERNEL_DEVICE).to(LOW)
    whole = packed_linear_triton(x, lay_out(packed))
    for rows in (1, 17, 40):
        part = packed_linear_triton(x[:rows], lay_out(packed))
        torch.testing.assert_close(part, whole[:rows], atol=0, rtol=0)


def test_wrong_shapes_are_named() -> None:
    packed = pack(torch.randn(8, 64), "fp4")
    with pytest.raises(ValueError, match="x: 32 columns, the matrix has 64"):
        packed_linear(torch.randn(2, 32), packed)
    with pytest.raises(ValueError, match=r"scale: expected \(8, 2\)"):
        PackedLinear(Packed("fp4", packed.weight, packed.scale[:, :1]))
    with pytest.raises(ValueError, match=r"weight: expected torch\.float8_e4m3fn"):
        check_packed(Packed("fp8", packed.weight, packed.scale))
    with pytest.raises(ValueError, match="48 inputs are not whole groups of 32"):
        check_packed(Packed("fp4", torch.zeros(2, 24, dtype=torch.uint8), packed.scale))
