"""Streams to one input and back: kernels against references, shards against whole batches."""

import pytest
import torch

from engine.kernels.hc_collapse import hc_collapse, hc_collapse_ref, hc_collapse_triton
from engine.kernels.hc_post import hc_post, hc_post_ref, hc_post_triton
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

# the interpreter truncates to bfloat16 where a GPU rounds; float16 it rounds
LOW = torch.float16 if INTERPRETED else torch.bfloat16
pytestmark = pytest.mark.usefixtures("poison")


def streams_of(
    num_tokens: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, 4, width).to(KERNEL_DEVICE, dtype)
    return x, torch.rand(num_tokens, 4).to(KERNEL_DEVICE) + 1e-6


def cut(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Zero-padded shards, by hand."""
    rows = -(-len(x) // size)
    whole = torch.cat((x, x.new_zeros(rows * size - len(x), *x.shape[1:])))
    return list(whole.split(rows))


@pytest.mark.parametrize("num_tokens", [1, 7, 32])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("way", ["ref", pytest.param("triton", marks=needs_triton)])
def test_shards_collapse_to_the_same_bits(way: str, size: int, num_tokens: int) -> None:
    """collapse(concat) == concat(collapse), exactly; at 1 token all ranks but one hold padding."""
    collapse = hc_collapse_ref if way == "ref" else hc_collapse_triton
    width = 1500 if INTERPRETED else 5120  # either way more than one tile
    x, pre = streams_of(num_tokens, width, torch.bfloat16)
    shards = list(zip(cut(x, size), cut(pre, size), strict=True))
    padding = [a for a, b in shards if not b.any()]
    assert len(padding) == {1: size - 1, 7: size - 7 if size == 8 else 0, 32: 0}[num_tokens]
    parts = torch.cat([collapse(a, b) for a, b in shards])
    assert not parts[num_tokens:].any()
    torch.testing.assert_close(parts[:num_tokens], collapse(x, pre), atol=0, rtol=0)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("shape", [(1, 2048), (3, 100), (5, 1030)])
def test_kernels_round_as_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bit for bit: a fused multiply-add would show in one of some ten thousand values."""
    x, pre = streams_of(*shape, dtype)
    wide = torch.cat((x, x), dim=2)[:, :, : shape[1]]  # rows that are not adjacent
    want = hc_collapse_ref(x, pre)
    torch.testing.assert_close(hc_collapse_triton(wide, pre), want, atol=0, rtol=0)
    turned = pre.t().contiguous().t()
    torch.testing.assert_close(hc_collapse_triton(x, turned), want, atol=0, rtol=0)
    y, comb = x[:, 1].contiguous(), torch.rand(shape[0], 4, 4).to(KERNEL_DEVICE)
    want = hc_post_ref(y, x, pre, comb)
    torch.testing.assert_close(hc_post_triton(y, wide, pre, comb), want, atol=0, rtol=0)


@needs_triton
def test_kernels_of_no_tokens() -> None:
    x, pre = streams_of(0, 64, LOW)
    assert hc_collapse_triton(x, pre).shape == (0, 64)
    assert hc_post_triton(x[:, 0], x, pre, pre[:, :, None].expand(0, 4, 4)).shape == (0, 4, 64)


def test_what_they_compute() -> None:
    """Against float64; old streams are the first index of comb."""
    x, pre = torch.randn(3, 4, 10), torch.rand(3, 4)
    y, comb = torch.randn(3, 10), torch.rand(3, 4, 4)
    wide = x.double()
    torch.testing.assert_close(
        hc_collapse(x, pre).double(), (pre.double()[..., None] * wide).sum(1), atol=1e-6, rtol=1e-6
    )
    mixed = comb.double().transpose(1, 2) @ wide + pre.double()[..., None] * y.double()[:, None]
    torch.testing.assert_close(hc_post(y, x, pre, comb).double(), mixed, atol=1e-6, rtol=1e-6)


def test_wrong_shapes_are_named() -> None:
    x, pre = torch.randn(3, 4, 10), torch.rand(3, 4)
    with pytest.raises(ValueError, match=r"pre: expected \[T S\]"):
        hc_collapse(x, pre[:2])
    with pytest.raises(ValueError, match=r"pre: expected torch\.float32"):
        hc_collapse(x, pre.half())
    with pytest.raises(ValueError, match=r"comb: expected \[T S S\]"):
        hc_post(x[:, 0], x, pre, torch.rand(3, 4, 5))
