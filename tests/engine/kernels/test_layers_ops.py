"""rope, norm, gated MLP and packed products against their formulas."""

import math

import pytest
import torch

from engine.kernels.activation import silu_mul
from engine.kernels.linear import Linear
from engine.kernels.norms import rms_norm
from engine.kernels.rope import inverse_frequencies, rope_ref, rope_table


def test_rope_rotates_half_split_pairs() -> None:
    dim, theta = 8, 100.0
    inv = inverse_frequencies(dim, theta)
    x = torch.randn(3, 2, dim)
    positions = torch.tensor([0, 5, 17])
    out = rope_ref(x, rope_table(inv, 32)[positions])
    for t, p in enumerate(positions.tolist()):
        for i in range(dim // 2):
            angle = p / theta ** (2 * i / dim)
            a, b = x[t, :, i], x[t, :, i + dim // 2]
            torch.testing.assert_close(out[t, :, i], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(
                out[t, :, i + dim // 2], b * math.cos(angle) + a * math.sin(angle)
            )


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths() -> None:
    plain = inverse_frequencies(64, 500000.0)
    scaled = inverse_frequencies(
        64,
        500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = scaled[~short & ~long]
    assert len(between) > 0
    assert bool(((between < plain[~short & ~long]) & (between > plain[~short & ~long] / 8)).all())


def test_rms_norm_and_silu() -> None:
    x, w = torch.randn(4, 10), torch.randn(10)
    want = x / (x.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * w
    torch.testing.assert_close(rms_norm(x, w, 1e-5), want)
    gate, up = x[:, :5], x[:, 5:]
    torch.testing.assert_close(silu_mul(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("bias", [True, False])
def test_packed_product_is_the_product_and_ignores_the_batch(bias: bool) -> None:
    w, b = torch.randn(96, 64), torch.randn(96) if bias else None
    linear = Linear(w.clone(), b)
    x = torch.randn(33, 64)
    exact = x.double() @ w.double().t() + (0 if b is None else b.double())
    reference = torch.nn.functional.linear(x, w, b)
    # twice the error of torch's own float32 product
    bound = 2 * float((reference.double() - exact).abs().max())
    assert float((linear(x).double() - exact).abs().max()) <= bound
    if linear.packed:
        for rows in (1, 2, 7, 8):
            torch.testing.assert_close(
                linear(x[:rows].contiguous()), linear(x)[:rows], rtol=0, atol=1e-4
            )
