"""Acceptance in Triton against its reference: the same tokens, whoever shares the batch."""

import pytest
import torch

from engine.kernels.acceptance import Acceptance, Drafts, accept_ref, accept_triton
from engine.kernels.sampling import SamplingRows
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("poison")]

DTYPES = [torch.float32, torch.bfloat16]
MIXED = (0.0, 1.0, 0.6)


class Case:
    """Drafts near the target's own choice, so that every accepted count occurs."""

    def __init__(
        self,
        lens: list[int],
        gamma: int,
        vocab: int,
        temperatures: tuple[float, ...] = MIXED,
        dtype: torch.dtype = torch.float32,
        padding: int = 0,
        filters: tuple[int, float, float] = (0, 1.0, 0.0),
    ) -> None:
        num = len(lens)
        cu = torch.tensor([0, *lens]).cumsum(0)
        logits = 2 * torch.randn(sum(lens) + padding, vocab)
        draft_logits = torch.randn(num, gamma, vocab)
        ids = torch.randint(0, vocab, (num, gamma))
        for r, n in enumerate(lens):
            for j in range(min(n - 1, gamma)):
                near = logits[cu[r] + j] + 0.5 * torch.randn(vocab)
                draft_logits[r, j], ids[r, j] = near, near.argmax()
        self.logits = logits.to(KERNEL_DEVICE, dtype)
        self.cu = cu.to(KERNEL_DEVICE, torch.int32)
        self.drafts = Drafts(ids.to(KERNEL_DEVICE), draft_logits.to(KERNEL_DEVICE, dtype))
        temperature = torch.tensor([temperatures[i % len(temperatures)] for i in range(num)])
        self.params = SamplingRows(
            temperature.to(KERNEL_DEVICE),
            torch.full((num,), filters[0], device=KERNEL_DEVICE),
            torch.full((num,), filters[1], device=KERNEL_DEVICE),
            torch.full((num,), filters[2], device=KERNEL_DEVICE),
            (torch.arange(num) * 7919 + 11).to(KERNEL_DEVICE),
        )
        self.positions = (torch.arange(num) * 31 + 2).to(KERNEL_DEVICE)

    def kernel(self, **promises: bool) -> Acceptance:
        return accept_triton(
            self.logits, self.cu, self.drafts, self.params, self.positions, **promises
        )

    def check(self, **promises: bool) -> Acceptance:
        got = self.kernel(**promises)
        want = accept_ref(self.logits, self.cu, self.drafts, self.params, self.positions)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert torch.equal(got.num_committed, want.num_committed)
        assert torch.equal(got.finite, want.finite)
        return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [13, 2500])
def test_greedy(vocab: int, dtype: torch.dtype) -> None:
    case = Case([4, 1, 3, 4, 2] * 3, 3, vocab, (0.0,), dtype)
    for out in (case.check(sampled=False), case.check()):
        assert len(set(out.num_committed.tolist())) > 1
    case.drafts = Drafts(case.drafts.token_ids, None)
    case.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "gamma", "vocab"), [(1, 7, 301), (12, 3, 17), (6, 2, 4500)])
def test_greedy_and_sampled_requests_together(
    num: int, gamma: int, vocab: int, dtype: torch.dtype
) -> None:
    lens = [1 + (i * 5 + gamma) % (gamma + 1) for i in range(num)]
    case = Case(lens, gamma, vocab, MIXED if num > 1 else (0.9,), dtype)
    case.check(filtered=False)
    case.check()


def test_every_count_and_every_kind_of_bonus() -> None:
    """40 sampled requests: all accepted, rejected at once, and all between."""
    out = Case([4] * 40, 3, 11, (1.0, 0.5)).check(filtered=False)
    assert sorted(set(out.num_committed.tolist())) == [1, 2, 3, 4]


@pytest.mark.parametrize("filters", [(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.2), (5, 0.8, 0.05)])
def test_filters(filters: tuple[int, float, float]) -> None:
    Case([3, 4, 2, 4, 1, 4, 4], 3, 53, MIXED, filters=filters, padding=2).check()


def test_padding_rows_commit_nothing_and_padding_is_inert() -> None:
    case = Case([3, 0, 4, 0, 1, 0], 3, 300, (1.0, 1.0, 0.0), padding=5)
    out = case.check(filtered=False)
    assert out.num_committed.tolist()[1::2] == [0, 0, 0]
    assert out.token_ids[1::2].eq(-1).all()
    case.logits[8:] = float("nan")
    assert case.drafts.logits is not None
    case.drafts.logits[1::2] = float("nan")
    case.drafts.logits[4, 1:] = float("inf")
    for promise in ({"filtered": False}, {}):
        again = case.kernel(**promise)
        assert torch.equal(again.token_ids, out.token_ids)
        assert torch.equal(again.finite, out.finite)


def test_no_drafts_is_one_token_of_the_targets_own() -> None:
    case = Case([1] * 5, 0, 700)
    assert case.check(filtered=False).num_committed.tolist() == [1] * 5
    greedy = case.kernel(sampled=False)
    assert torch.equal(greedy.token_ids[:, 0], case.logits.argmax(dim=-1))


def test_tokens_the_draft_cannot_say() -> None:
    """A reduced draft vocabulary has -inf elsewhere; the residual there is the target's."""
    case = Case([4] * 9, 3, 2500, (1.0,))
    assert case.drafts.logits is not None
    case.drafts.logits[..., 1000:] = float("-inf")
    case.drafts.logits[..., :64] = float("-inf")
    case.drafts.token_ids.copy_(case.drafts.logits.argmax(dim=-1))
    case.check(filtered=False)


def test_draft_equal_to_target_is_accepted_or_falls_back_to_the_target() -> None:
    """The residual is 0 everywhere: rounding alone could reject, and then the target is drawn."""
    case = Case([3] * 8, 2, 40, (1.0,))
    assert case.drafts.logits is not None
    case.drafts.logits.copy_(case.logits.view(8, 3, 40)[:, :2])
    out = case.kernel(filtered=False)
    assert bool((out.token_ids.max(dim=1).values < 40).all())
    assert int(out.num_committed.min()) >= 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of inf - inf
def test_a_request_whose_logits_are_no_numbers_is_told() -> None:
    case = Case([2, 2, 2, 2, 2, 2], 1, 100, (0.0, 1.0))
    for row, value in ((2, "nan"), (7, "nan"), (8, "inf"), (11, "inf")):
        case.logits[row, 5] = float(value)
    out = case.kernel(filtered=False)
    assert out.finite.tolist() == [True, False, True, False, False, False]
    inside = (out.token_ids >= -1) & (out.token_ids < 100)
    assert bool(inside.all())
    want = accept_ref(case.logits, case.cu, case.drafts, case.params, case.positions)
    assert torch.equal(out.finite, want.finite)


@pytest.mark.gpu
def test_nothing_waits_and_a_graph_replays_it() -> None:
    case = Case([4, 0, 3, 4], 3, 5000, (1.0, 0.0), torch.bfloat16, padding=5, filters=(9, 0.9, 0.0))
    eager = [case.kernel(), case.kernel(filtered=False), case.kernel(sampled=False)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [case.kernel(), case.kernel(filtered=False), case.kernel(sampled=False)]
    graph.replay()
    for a, b in zip(eager, out, strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.num_committed, b.num_committed)
