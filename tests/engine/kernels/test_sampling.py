"""target_probs against a token-by-token definition; draws by key."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.sampling import SamplingRows, sample, target_probs


def define(logits: list[float], t: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, one token at a time, in float64."""
    x = np.array(logits, dtype=np.float64) / t
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(probs[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if top_p < 1.0 and mass >= top_p - 1e-9 and kept:
            break
        kept.append(i)
        mass += probs[i] / total
    kept = [i for i in kept if probs[i] >= min_p * probs[order[0]] - 1e-12 or i == order[0]]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def params(t: float, top_k: int, top_p: float, min_p: float, key: int = 1) -> SamplingRows:
    return SamplingRows(
        torch.tensor([t]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
        torch.tensor([key]),
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-6, 6).map(lambda i: i * 0.37), min_size=2, max_size=12),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 5, 50]),
    st.sampled_from([0.15, 0.501, 0.93, 1.0]),
    st.sampled_from([0.0, 0.07, 0.31, 1.0]),
)
def test_filters(logits: list[float], t: float, top_k: int, top_p: float, min_p: float) -> None:
    got = target_probs(torch.tensor([logits]), params(t, top_k, top_p, min_p))[0]
    want = define(logits, t, top_k, top_p, min_p)
    # a cumulative sum that meets top_p, or a ratio that meets min_p, may round either way
    if not np.array_equal(got.numpy() > 0, want > 0):
        near = [
            define(logits, t, top_k, min(top_p + e, 1.0), max(min_p + f, 0.0))
            for e in (-1e-5, 1e-5)
            for f in (-1e-5, 1e-5)
        ]
        assert any(np.array_equal(got.numpy() > 0, n > 0) for n in near)
        return
    np.testing.assert_allclose(got.numpy(), want, atol=2e-6)


def test_mixed_batch_equals_each_row_alone() -> None:
    logits = torch.randn(4, 50)
    each = [(1.0, 0, 1.0, 0.0), (0.5, 3, 1.0, 0.0), (2.0, 0, 0.4, 0.1), (1.0, 7, 0.9, 0.05)]
    rows = [params(*e) for e in each]
    together = SamplingRows(
        *(torch.cat([getattr(r, f) for r in rows]) for f in SamplingRows.__slots__)
    )
    got = target_probs(logits, together)
    for i, row in enumerate(rows):
        torch.testing.assert_close(
            got[i], target_probs(logits[i : i + 1], row)[0], rtol=0, atol=1e-7
        )


def test_temperature_zero_is_argmax_with_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert sample(logits, params(0.0, 0, 1.0, 0.0), torch.tensor([5])).tolist() == [1]


def test_draws_follow_the_key_and_the_position() -> None:
    logits = torch.zeros(1, 1000)
    first = sample(logits, params(1.0, 0, 1.0, 0.0, key=9), torch.tensor([5]))
    assert torch.equal(first, sample(logits, params(1.0, 0, 1.0, 0.0, key=9), torch.tensor([5])))
    others = [
        sample(logits, params(1.0, 0, 1.0, 0.0, key=k), torch.tensor([p]))
        for k, p in [(10, 5), (9, 6), (11, 5), (9, 7)]
    ]
    assert sum(int(o) != int(first) for o in others) >= 3  # fails by chance with odds < 6e-6


def test_strided_parameters_are_refused() -> None:
    """Columns of a [R, 3] table once reached kernels that step with stride 1."""
    table = torch.ones(4, 3)
    good = params(1.0, 0, 1.0, 0.0)
    with pytest.raises(ValueError, match="temperature: expected a contiguous tensor"):
        SamplingRows(table[:, 0], good.top_k, good.top_p, good.min_p, good.noise_key)
