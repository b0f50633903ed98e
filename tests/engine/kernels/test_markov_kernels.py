"""The fused chain against its reference: same tokens in float32, twice its error below."""

import pytest
import torch

from engine.kernels.linear import Linear
from engine.kernels.markov import (
    Chain,
    MarkovWeights,
    markov_chain_ref,
    markov_chain_triton,
)
from engine.kernels.noise import DRAFT, gumbel_ref
from engine.kernels.sampling import SamplingRows
from tests.helpers.close import assert_as_good_as
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]

GAMMA, HIDDEN = 3, 24
LOW = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]


def rows(num: int, temperatures: tuple[float, ...] = (0.0, 0.8, 1.2)) -> SamplingRows:
    return SamplingRows(
        torch.tensor([temperatures[i % len(temperatures)] for i in range(num)]).to(KERNEL_DEVICE),
        torch.zeros(num, dtype=torch.int64, device=KERNEL_DEVICE),
        torch.ones(num, device=KERNEL_DEVICE),
        torch.zeros(num, device=KERNEL_DEVICE),
        torch.arange(num, device=KERNEL_DEVICE) * 104729 - 5,
    )


class Case:
    """Inputs of one chain; the draft vocabulary may be a part of the target's."""

    def __init__(
        self, kind: str, num: int, vocab: int, rank: int, dtype: torch.dtype, reduced: int = 0
    ) -> None:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape).to(KERNEL_DEVICE, dtype)

        draft_vocab = reduced or vocab
        inner = {
            "gated": (rank, HIDDEN + rank),
            "rnn": (3 * rank, 2 * rank + HIDDEN),
        }.get(kind)
        self.weights = MarkovWeights(
            kind,  # type: ignore[arg-type]
            None if kind == "none" else randn(vocab, rank),
            None if kind == "none" else Linear(randn(draft_vocab, rank) / rank**0.5, pack=False),
            Linear(randn(*inner) / inner[1] ** 0.5, randn(inner[0]), pack=False) if inner else None,
        )
        self.base, self.hidden = randn(num, GAMMA, draft_vocab), randn(num, GAMMA, HIDDEN)
        self.anchors = torch.randint(0, vocab, (num,)).to(KERNEL_DEVICE)
        self.positions = (torch.arange(num) * 77 + 1).to(KERNEL_DEVICE)
        self.map = None
        if reduced:
            self.map = torch.randperm(vocab)[:reduced].sort().values.to(KERNEL_DEVICE)
        self.params = rows(num)

    def args(self) -> tuple[object, ...]:
        return (
            self.base,
            self.hidden,
            self.anchors,
            self.weights,
            self.map,
            self.params,
            self.positions,
        )


def compare(case: Case, sampled: bool) -> None:
    got: Chain = markov_chain_triton(*case.args(), sampled=sampled)  # type: ignore[arg-type]
    want: Chain = markov_chain_ref(*case.args(), sampled=sampled)  # type: ignore[arg-type]
    assert torch.equal(got.token_ids, want.token_ids)
    assert (got.logits is None) == (want.logits is None) == (not sampled)
    if got.logits is not None and want.logits is not None:
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
    assert (got.prev_embeds is None) == (want.prev_embeds is None)
    if got.prev_embeds is not None and want.prev_embeds is not None:
        assert torch.equal(got.prev_embeds, want.prev_embeds)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_float32_chain_is_the_references(kind: str, sampled: bool) -> None:
    compare(Case(kind, num=5, vocab=301, rank=20, dtype=torch.float32), sampled)


@pytest.mark.parametrize(
    ("num", "vocab", "rank"), [(1, 37, 5), (17, 130, 64), (2, 999, 256), (33, 70, 16)]
)
def test_odd_sizes(num: int, vocab: int, rank: int) -> None:
    compare(Case("vanilla", num, vocab, rank, torch.float32), sampled=True)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", ["none", "vanilla"])
def test_a_reduced_vocabulary_chains_in_target_ids(kind: str, sampled: bool) -> None:
    compare(Case(kind, 4, vocab=200, rank=8, dtype=torch.float32, reduced=61), sampled)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("num", "rank"), [(3, 100), (20, 32)])
def test_low_precision(kind: str, num: int, rank: int, dtype: torch.dtype) -> None:
    """Position by position along the kernel's own chain: logits, and the choice made of them."""
    case = Case(kind, num, 333, rank, dtype)
    chain: Chain = markov_chain_triton(*case.args(), sampled=True)  # type: ignore[arg-type]
    assert chain.logits is not None
    assert chain.prev_embeds is not None
    prev, state, wide_state = case.anchors, None, None
    w = case.weights
    wide = MarkovWeights(w.kind, None, None, w.inner and _float(w.inner))
    assert w.w1 is not None
    assert w.w2 is not None
    if kind == "rnn":
        state = torch.zeros_like(chain.prev_embeds[:, 0])
        wide_state = state.float()
    for k in range(GAMMA):
        embed, hidden = w.w1[prev], case.hidden[:, k]
        assert torch.equal(chain.prev_embeds[:, k], embed)
        f, state = w.features(embed, hidden, state)
        wide_f, wide_state = wide.features(embed.float(), hidden.float(), wide_state)
        exact = case.base[:, k].float() + wide_f @ w.w2.weight.float().t()
        assert_as_good_as(chain.logits[:, k], exact, case.base[:, k] + w.w2(f))
        prev = chain.token_ids[:, k]
        _check_choice(case, chain.logits[:, k].float(), prev, k)


def _float(linear: Linear) -> Linear:
    assert linear.bias is not None
    return Linear(linear.weight.float(), linear.bias.float(), pack=False)


def _check_choice(case: Case, logits: torch.Tensor, chosen: torch.Tensor, k: int) -> None:
    """A sampled row takes the best of its kept logits; a greedy one is within their rounding."""
    temperature = case.params.temperature
    hot = temperature > 0
    at = case.positions
    noise = gumbel_ref(case.params.noise_key, at + 1 + k, DRAFT, logits.shape[1], at)
    score = logits / torch.where(hot, temperature, 1.0)[:, None]
    score = torch.where(hot[:, None], score + noise, score)
    short = score.amax(dim=1) - score.gather(1, chosen[:, None])[:, 0]
    rounding = logits.abs().amax(dim=1) * torch.finfo(case.base.dtype).eps
    assert bool((short <= torch.where(hot, 2e-6, rounding)).all())


def test_a_rows_draft_does_not_depend_on_the_batch() -> None:
    case = Case("vanilla", 6, 500, 32, torch.float32)
    both: Chain = markov_chain_triton(*case.args(), sampled=True)  # type: ignore[arg-type]
    alone = markov_chain_triton(
        case.base[4:5],
        case.hidden[4:5],
        case.anchors[4:5],
        case.weights,
        None,
        case.params.select(torch.tensor([4], device=KERNEL_DEVICE)),
        case.positions[4:5],
        sampled=True,
    )
    assert torch.equal(both.token_ids[4:5], alone.token_ids)


def test_no_number_in_a_row_still_gives_ids() -> None:
    case = Case("vanilla", 2, 100, 16, torch.float32)
    case.base[0] = float("nan")
    chain: Chain = markov_chain_triton(*case.args(), sampled=True)  # type: ignore[arg-type]
    assert bool(((chain.token_ids >= 0) & (chain.token_ids < 100)).all())
