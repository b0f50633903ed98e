"""The product of q, k and v with norm, rotation and store in it, against one after the other."""

from pathlib import Path

import pytest
import torch

from engine.kernels.few_rows import BLOCK_N, FewRows, few_rows_triton
from engine.kernels.linear import Linear
from engine.kernels.rope import inverse_frequencies, rope_table
from engine.kernels.rope_product import (
    Turn,
    fits,
    rope_product,
    rope_product_ref,
    rope_product_triton,
)
from engine.kernels.rope_store import rope_store_triton
from tests.helpers.ahead import compiling
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton, summable

# the interpreter truncates to bfloat16 where a GPU rounds
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
WIDTH = 512


class Layer:
    """Weights, and a cache whose slots hold what must be left alone: NaN."""

    def __init__(
        self,
        rows: int,
        *,
        heads: tuple[int, int] = (3, 2),
        dim: int = 64,
        norms: str = "qk",
        head_major: bool = False,
        biased: bool = False,
        dtype: torch.dtype = torch.float16,
        device: str = KERNEL_DEVICE,
    ) -> None:
        def some(*shape: int) -> torch.Tensor:
            return torch.randn(*shape).to(device, dtype)

        (q, kv), columns = heads, (heads[0] + 2 * heads[1]) * dim
        self.x, self.weight = some(rows, WIDTH), some(columns, WIDTH) / 16
        self.bias = some(columns) if biased else None
        self.norms = tuple(some(dim) if n in norms else None for n in "qk")
        at = torch.arange(rows, device=device)
        angles = rope_table(inverse_frequencies(dim, 100.0), 32).to(device)[at * 7 % 31]
        # every third token is padding; the others' slots are in no order
        slots = torch.where(at % 3 == 1, -1, at * 11 % 23)
        self.cache = torch.full((2, 23, kv, dim), float("nan"), dtype=dtype, device=device)
        self.angles, self.slots, self.head_major = angles, slots, head_major
        self.query_heads = q

    def made_summable(self) -> "Layer":
        """With values whose sums no order changes."""
        self.x = summable(*self.x.shape, dtype=self.x.dtype)
        self.weight = summable(*self.weight.shape, dtype=self.x.dtype, steps=128)
        if self.bias is not None:
            self.bias = summable(*self.bias.shape, dtype=self.x.dtype)
        return self

    def turn(self, dtype: torch.dtype) -> Turn:
        norms = (None if w is None else w.to(dtype) for w in self.norms)
        k, v = self.cache.to(dtype, copy=True)
        if self.head_major:
            k, v = (c.transpose(0, 1).contiguous().transpose(0, 1) for c in (k, v))
        return Turn(*norms, 1e-6, self.angles, k, v, self.slots)

    def way(self, parts: int) -> FewRows:
        tiles = len(self.weight) // BLOCK_N
        return FewRows(parts, torch.zeros(tiles, dtype=torch.int32, device=self.x.device))

    def reference(self, dtype: torch.dtype) -> tuple[torch.Tensor, Turn]:
        turn, bias = self.turn(dtype), None if self.bias is None else self.bias.to(dtype)
        return rope_product_ref(self.x.to(dtype), self.weight.to(dtype), bias, turn), turn

    def check(self, parts: int) -> None:
        exact, exact_turn = self.reference(torch.float32)
        low, low_turn = self.reference(self.x.dtype)
        way = self.way(parts)
        for _ in range(2):  # counts are as they were
            turn = self.turn(self.x.dtype)
            out = rope_product_triton(self.x, self.weight, self.bias, way, turn)
            assert out.shape == (len(self.x), self.query_heads, self.cache.shape[-1])
            assert_as_good_as(out, exact, low)
            for name in ("k_cache", "v_cache"):
                got, want = getattr(turn, name), getattr(low_turn, name)
                known = want.isfinite()
                assert torch.equal(known, got.isfinite())
                assert_as_good_as(got[known], getattr(exact_turn, name)[known], want[known])
            assert not way.counts.any()


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "dim", "parts"),
    [(1, 64, 1), (7, 64, 2), (16, 64, 4), (1, 128, 4), (7, 128, 1), (16, 128, 2)],
)
def test_heads_are_turned_and_stored(rows: int, dim: int, parts: int, dtype: torch.dtype) -> None:
    Layer(rows, dim=dim, dtype=dtype).check(parts)


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("heads", "norms", "biased"),
    [
        ((4, 1), "", True),
        ((4, 1), "q", False),
        ((4, 1), "k", True),
        ((2, 2), "qk", True),
        ((1, 1), "qk", False),
    ],
)
def test_groups_norms_and_biases(heads: tuple[int, int], norms: str, biased: bool) -> None:
    Layer(5, heads=heads, norms=norms, biased=biased).check(2)


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dim", [64, 256])
def test_caches_by_head(dim: int) -> None:
    Layer(5, dim=dim, head_major=True).check(1)


@needs_triton
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_rounds_as_a_product_and_rope_store_by_themselves(dim: int, biased: bool) -> None:
    """The bits of both, but for one unit here and there: squares are added up in another order."""
    layer = Layer(16, dim=dim, biased=biased).made_summable()
    one, two, way = layer.turn(torch.float16), layer.turn(torch.float16), layer.way(2)
    q = rope_product_triton(layer.x, layer.weight, layer.bias, way, one)
    qkv = few_rows_triton(layer.x, layer.weight, layer.bias, way)
    want = rope_store_triton(qkv.view(16, -1, dim), *two)
    for got, expected in ((q, want), (one.k_cache, two.k_cache), (one.v_cache, two.v_cache)):
        known = expected.isfinite()
        assert torch.equal(known, got.isfinite())
        assert (got[known] == expected[known]).float().mean() > 0.99


@needs_triton
def test_the_op_takes_few_rows_there_and_leaves_more_to_the_product() -> None:
    for rows in (5, 17):
        layer = Layer(rows, biased=True)
        matrix = Linear(layer.weight, layer.bias, pack=False)
        matrix.few = layer.way(2)
        turn, want = layer.turn(torch.float16), layer.turn(torch.float16)
        got = rope_product(layer.x, matrix, turn)
        if rows > 16:
            expected = rope_product_ref(layer.x, layer.weight, layer.bias, want)
        else:
            args = layer.x, layer.weight, layer.bias, layer.way(2), want
            expected = rope_product_triton(*args)
        close = {"atol": 0.0, "rtol": 0.0} if rows <= 16 else {"atol": 0.05, "rtol": 0.01}
        torch.testing.assert_close(got, expected, **close)
        for a, b in ((turn.k_cache, want.k_cache), (turn.v_cache, want.v_cache)):
            torch.testing.assert_close(a, b, equal_nan=True, **close)


@needs_triton
def test_a_row_has_the_same_bits_beside_any_others() -> None:
    layer = Layer(16, dim=128)
    if INTERPRETED:
        layer.made_summable()
    turn = layer.turn(layer.x.dtype)
    whole = rope_product_triton(layer.x, layer.weight, None, layer.way(2), turn)
    for rows in (1, 3, 15):
        few = layer.turn(layer.x.dtype)
        few = few._replace(cos_sin=few.cos_sin[:rows], slots=few.slots[:rows])
        some = rope_product_triton(layer.x[:rows], layer.weight, None, layer.way(2), few)
        assert torch.equal(some, whole[:rows])
        stored = few.slots[few.slots >= 0]
        assert torch.equal(few.k_cache[stored], turn.k_cache[stored])
        assert torch.equal(few.v_cache[stored], turn.v_cache[stored])


@needs_triton
def test_what_it_cannot_do() -> None:
    layer = Layer(0)
    turn = layer.turn(layer.x.dtype)
    out = rope_product_triton(layer.x, layer.weight, None, layer.way(1), turn)
    assert out.shape == (0, 3, 64)
    three = Layer(3)
    for name, wrong in (("slots", turn.slots), ("cos_sin", three.angles[:, :, :16])):
        other = three.turn(turn.k_cache.dtype)._replace(**{name: wrong})
        with pytest.raises(ValueError, match=name):
            rope_product_triton(three.x, three.weight, None, three.way(1), other)
    right, bias = three.turn(turn.k_cache.dtype), three.weight[0, :3]
    with pytest.raises(ValueError, match="bias"):
        rope_product_triton(three.x, three.weight, bias, three.way(1), right)
    x = layer.weight.new_zeros(17, WIDTH)
    with pytest.raises(ValueError, match="17 rows, at most 16"):
        rope_product_triton(x, layer.weight, None, layer.way(1), turn)
    small = turn._replace(
        q_weight=None,
        k_weight=None,
        k_cache=turn.k_cache[..., :32],
        v_cache=turn.v_cache[..., :32],
    )
    with pytest.raises(ValueError, match="448 outputs are no heads of 32"):
        rope_product_triton(layer.x, layer.weight, None, layer.way(1), small)
    other = turn._replace(v_cache=turn.v_cache.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(ValueError, match="strides"):
        rope_product_triton(layer.x, layer.weight, None, layer.way(1), other)
    assert [dim for dim in (32, 64, 80, 96, 128, 192, 256) if fits(dim)] == [64, 128, 256]


@pytest.mark.skipif(INTERPRETED, reason="compiles; the interpreter does not")
@pytest.mark.parametrize("parts", [1, 2])
def test_what_it_compiles_to(parts: int, tmp_path: Path) -> None:
    """For compute capability 9.0: tensor cores, loads under way, an early start."""
    with compiling(tmp_path) as made:
        layer = Layer(8, dim=128, dtype=torch.bfloat16, device="cpu")
        rope_product_triton(
            layer.x, layer.weight, None, layer.way(parts), layer.turn(torch.bfloat16)
        )
    (kernel,) = made.kernels["_rope_product_kernel"]
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.cg" in ptx
    assert "griddepcontrol.wait" in ptx
