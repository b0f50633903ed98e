"""Which drafts are verified: the definition against a naive sort, and the kernel against it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.verify_plan import (
    survival_of,
    verify_lens,
    verify_lens_ref,
    verify_lens_triton,
)
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

TRIALS = 4000


def naive(survival: list[list[float]], live: list[bool], budget: int) -> list[int]:
    """Sort all drafts by (survival falling, position, row) and take the first ones."""
    cells = [(-s, k, r) for r, row in enumerate(survival) if live[r] for k, s in enumerate(row)]
    lens = [int(alive) for alive in live]
    for _, _, r in sorted(cells)[:budget]:
        lens[r] += 1
    return lens


def draw(rng: random.Random) -> tuple[list[list[float]], list[bool], int]:
    """Few distinct values, so that most comparisons are ties; some rows are padding."""
    num_reqs, gamma = rng.randint(1, 9), rng.randint(1, 7)
    values = [rng.random() for _ in range(rng.randint(1, 4))] + [0.0, 1.0]
    survival = []
    for _ in range(num_reqs):
        row, s = [], 1.0
        for _ in range(gamma):
            s = min(s, rng.choice(values))
            row.append(s)
        survival.append(row)
    survival = torch.tensor(survival).tolist()  # as float32 has them
    live = [rng.random() < 0.8 for _ in range(num_reqs)]
    return survival, live, rng.randint(0, num_reqs * gamma + 3)


def as_tensors(
    survival: list[list[float]], live: list[bool], budget: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(survival, device=device),
        torch.arange(len(live), device=device) * 10,
        torch.tensor(live, device=device),
        torch.tensor([budget], device=device),
    )


def test_the_largest_survivals_win_in_4000_random_trials() -> None:
    rng = random.Random(0)
    for _ in range(TRIALS):
        case = draw(rng)
        assert verify_lens(*as_tensors(*case, "cpu")).lens.tolist() == naive(*case)


@needs_triton
@pytest.mark.usefixtures("poison")
def test_kernel_is_the_definition() -> None:
    rng = random.Random(1)
    for _ in range(150 if INTERPRETED else TRIALS):
        case = draw(rng)
        got = verify_lens_triton(*as_tensors(*case, KERNEL_DEVICE))
        want = naive(*case)
        assert got.lens.dtype == got.seq_lens.dtype == torch.int32
        assert got.lens.tolist() == want
        assert got.seq_lens.tolist() == [n and 10 * r + n for r, n in enumerate(want)]


@needs_triton
@pytest.mark.parametrize("num_reqs", [1, 64, 256])
def test_kernel_at_full_size(num_reqs: int) -> None:
    if INTERPRETED and num_reqs > 64:
        pytest.skip("minutes in the interpreter; runs on a GPU")
    survival = torch.rand(num_reqs, 7).cumprod(dim=1)
    survival[::3] = survival[0].clone()
    live = torch.rand(num_reqs) < 0.9
    for budget in (0, 1, num_reqs, 3 * num_reqs, 7 * num_reqs):
        starts = torch.arange(num_reqs) * 100_003
        want = verify_lens_ref(survival, starts, live, torch.tensor([budget]))
        got = verify_lens_triton(
            survival.to(KERNEL_DEVICE),
            starts.to(KERNEL_DEVICE),
            live.to(KERNEL_DEVICE),
            torch.tensor([budget], device=KERNEL_DEVICE),
        )
        assert torch.equal(got.lens.cpu(), want.lens)
        assert torch.equal(got.seq_lens.cpu(), want.seq_lens)


probabilities = st.floats(0.0, 1.0, width=32)


@settings(max_examples=200)
@given(st.data())
def test_admission_ignores_what_is_drafted_at_or_after(data: st.DataObject) -> None:
    """Non-anticipation (paper 3.2.2): draft k decides confidences after k only, whatever those
    become, draft k is verified or not all the same."""
    num_reqs, gamma = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    cells = st.lists(probabilities, min_size=gamma, max_size=gamma)
    confidence = torch.tensor(data.draw(st.lists(cells, min_size=num_reqs, max_size=num_reqs)))
    budget = torch.tensor([data.draw(st.integers(0, num_reqs * gamma))])
    live, starts = torch.ones(num_reqs, dtype=torch.bool), torch.zeros(num_reqs).long()
    r, k = data.draw(st.integers(0, num_reqs - 1)), data.draw(st.integers(0, gamma - 1))
    before = verify_lens(confidence.cumprod(dim=1), starts, live, budget).lens[r] - 1 > k
    confidence[r, k + 1 :] = torch.tensor(data.draw(cells))[k + 1 :]
    after = verify_lens(confidence.cumprod(dim=1), starts, live, budget).lens[r] - 1 > k
    assert bool(before) == bool(after)


def test_survival_is_the_running_product_after_calibration() -> None:
    logits = torch.randn(5, 4)
    temperatures = torch.tensor([0.5, 1.0, 2.0, 10.0])
    shifts = torch.tensor([0.0, 1.0, -2.0, 0.5])
    got = survival_of(logits, temperatures, shifts)
    for r in range(5):
        product = 1.0
        for k in range(4):
            x = logits[r, k].double() / temperatures[k].double() + shifts[k].double()
            product *= float(torch.sigmoid(x))
            assert float(got[r, k]) == pytest.approx(product, rel=1e-5)


def test_a_confidence_that_is_no_number_counts_as_none() -> None:
    logits = torch.tensor([[3.0, float("nan"), 3.0], [1.0, 1.0, 1.0]])
    got = survival_of(logits, torch.ones(3), torch.zeros(3))
    assert got[0, 1:].tolist() == [0.0, 0.0]
    assert got[0, 0] > 0.9
    live, starts = torch.ones(2, dtype=torch.bool), torch.zeros(2).long()
    lens = verify_lens(got, starts, live, torch.tensor([4])).lens
    assert lens.tolist() == [2, 4]
