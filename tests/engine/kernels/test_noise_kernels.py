"""Noise and draws in Triton against their references: words exactly, choices exactly."""

import pytest
import torch

from engine.kernels.noise import ACCEPT, BONUS, DRAFT, gumbel_ref, philox_ref, uniform_ref
from engine.kernels.noise_triton import gumbel_triton, uniform_triton, words_triton
from engine.kernels.sampling import SamplingRows, sample_ref, sample_triton, target_probs
from engine.kernels.sampling_triton import best_ids_triton
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]


def int64s(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=KERNEL_DEVICE)


KEYS = (0, -1, 2**62 + 12345, -(2**63), 987654321987, 7)
POSITIONS = (0, 1, 70_000, 2**31 + 5, 2**32 - 1, 31)
ROUNDS = (0, 2**32 - 1, 70_000, 3, 2**31, 30)


@pytest.mark.parametrize("vocab_size", [1, 5, 1003])
@pytest.mark.parametrize("stream", [DRAFT, ACCEPT, BONUS])
def test_words_are_philox(vocab_size: int, stream: int) -> None:
    keys, positions, rounds = int64s(*KEYS), int64s(*POSITIONS), int64s(*ROUNDS)
    got = words_triton(keys, positions, stream, vocab_size, rounds)
    quads = torch.arange((vocab_size + 3) // 4, device=KERNEL_DEVICE)
    want = philox_ref(
        keys[:, None],
        quads[None],
        positions[:, None],
        torch.full_like(positions, stream)[:, None],
        rounds[:, None],
    )
    assert torch.equal(got, torch.stack(want, dim=-1).flatten(1)[:, :vocab_size])


def test_uniforms_are_the_references() -> None:
    """Bit for bit: the fused kernels compare them with probabilities."""
    n = 3001
    keys = torch.randint(-(2**62), 2**62, (n,)).to(KERNEL_DEVICE)
    positions = torch.arange(n, device=KERNEL_DEVICE)
    rounds = positions * 3
    got = uniform_triton(keys, positions, ACCEPT, rounds)
    assert torch.equal(got, uniform_ref(keys, positions, ACCEPT, rounds))


def test_gumbel_is_the_references_to_the_last_bits() -> None:
    keys, positions, rounds = int64s(*KEYS), int64s(*POSITIONS), int64s(*ROUNDS)
    got = gumbel_triton(keys, positions, BONUS, 2003, rounds)
    want = gumbel_ref(keys, positions, BONUS, 2003, rounds)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=2e-6)
    assert bool((got > 6).any())  # the tail that decides draws was seen
    logits = torch.randn(len(KEYS), 2003, device=KERNEL_DEVICE)
    assert torch.equal((logits + got).argmax(dim=1), (logits + want).argmax(dim=1))


def rows(temperature: list[float], **filters: float) -> SamplingRows:
    n = len(temperature)
    return SamplingRows(
        torch.tensor(temperature, device=KERNEL_DEVICE),
        torch.full((n,), int(filters.get("top_k", 0)), device=KERNEL_DEVICE),
        torch.full((n,), filters.get("top_p", 1.0), device=KERNEL_DEVICE),
        torch.full((n,), filters.get("min_p", 0.0), device=KERNEL_DEVICE),
        int64s(*(7919 * i + 3 for i in range(n))),
    )


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 3), (3, 4099), (17, 301)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits = (2 * torch.randn(num_rows, vocab_size + 1)).to(KERNEL_DEVICE, dtype)[:, :-1]
    params = rows([(0.0, 0.7, 1.3)[i % 3] for i in range(num_rows)])
    positions = torch.arange(num_rows, device=KERNEL_DEVICE) * 1000
    want = sample_ref(logits, params, positions)
    assert torch.equal(sample_triton(logits, params, positions, filtered=False), want)
    assert torch.equal(sample_triton(logits, params, positions), want)
    greedy = sample_triton(logits, params, positions, sampled=False)
    assert torch.equal(greedy, logits.argmax(dim=-1))


@pytest.mark.parametrize("filters", [{"top_k": 3.0}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_sample_with_filters(filters: dict[str, float]) -> None:
    logits = torch.randn(9, 501).to(KERNEL_DEVICE)
    params = rows([0.0, 1.0, 0.5] * 3, **filters)
    positions = torch.arange(9, device=KERNEL_DEVICE)
    want = sample_ref(logits, params, positions)
    assert torch.equal(sample_triton(logits, params, positions), want)


def test_ties_go_to_the_lowest_id_and_nan_gives_an_id() -> None:
    logits = torch.zeros(4, 5000, device=KERNEL_DEVICE)
    logits[1, [4000, 77, 2500]] = 1.0
    logits[2] = float("-inf")
    logits[3] = float("nan")
    assert best_ids_triton(logits).tolist() == [0, 77, 0, 0]


def test_no_filters_promised_is_the_plain_softmax() -> None:
    logits, params = torch.randn(3, 50).to(KERNEL_DEVICE), rows([0.0, 0.5, 2.0])
    temperature = torch.tensor([1.0, 0.5, 2.0], device=KERNEL_DEVICE)
    want = (logits / temperature[:, None]).softmax(dim=-1)
    torch.testing.assert_close(target_probs(logits, params, filtered=False), want)
    torch.testing.assert_close(target_probs(logits, params), want)
