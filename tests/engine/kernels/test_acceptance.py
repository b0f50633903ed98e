"""Losslessness, exactly: sum over every draft and every grid point of the uniforms."""

import itertools

import pytest
import torch

from engine.kernels.acceptance import (
    Drafts,
    accept,
    accept_greedy_ref,
    bonus_weights,
    count_accepted,
)
from engine.kernels.sampling import SamplingRows

DRAFT = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
TARGET = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]])


def exact_output(draft: torch.Tensor, target: torch.Tensor, verify_len: int) -> torch.Tensor:
    """[G+1, V] P(token at k, at least k+1 committed), by enumeration.

    Every ratio is a multiple of 1/8, so 8 midpoints integrate the uniforms exactly; the bonus
    token's distribution enters as a whole. A count of verify_len leaves no bonus to draw.
    """
    gamma, vocab = draft.shape
    cells = 8
    u = torch.cartesian_prod(*[(torch.arange(cells) + 0.5) / cells] * gamma).view(-1, gamma)
    n = len(u)
    lens = torch.full((n,), verify_len)
    mass = torch.zeros(gamma + 1, vocab, dtype=torch.float64)
    for ids in itertools.product(range(vocab), repeat=gamma):
        weight = float(torch.prod(draft[torch.arange(gamma), list(ids)])) / n
        q, p = draft.expand(n, -1, -1), target.expand(n, -1, -1)
        count = count_accepted(torch.tensor(ids).expand(n, -1), q, p, lens, u)
        bonus = bonus_weights(q, p, count).double()
        bonus /= bonus.sum(dim=1, keepdim=True)
        for k in range(gamma + 1):
            if k < gamma:
                mass[k, ids[k]] += weight * int((count > k).sum())
            if k < verify_len:
                mass[k] += weight * bonus[count == k].sum(dim=0)
    return mass


@pytest.mark.parametrize("verify_len", [1, 2, 3])
def test_output_distribution_is_the_targets(verify_len: int) -> None:
    mass = exact_output(DRAFT, TARGET, verify_len)
    for k in range(verify_len):
        torch.testing.assert_close(mass[k] / mass[k].sum(), TARGET[k].double(), atol=1e-6, rtol=0)


def test_the_enumeration_sees_a_biased_rule() -> None:
    """Negative control: a bonus drawn from the target instead of the residual is off by 1/16."""
    q, p = DRAFT[:1], TARGET[:2]
    accepted = torch.minimum(q[0], p[0]).double()
    biased = accepted + (1 - accepted.sum()) * p[0].double()
    assert float((biased - p[0].double()).abs().max()) > 0.06


def rows(temperature: list[float]) -> SamplingRows:
    n = len(temperature)
    return SamplingRows(
        torch.tensor(temperature),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n),
        torch.zeros(n),
        torch.arange(n) * 7919 + 1,
    )


def test_greedy_keeps_the_matching_prefix_and_adds_the_targets_choice() -> None:
    target = torch.tensor([5, 6, 7, 1, 2, 3, 9])
    cu = torch.tensor([0, 3, 6, 7], dtype=torch.int32)
    drafts = torch.tensor([[5, 6], [1, 9], [8, 8]])
    out = accept_greedy_ref(target, cu, drafts)
    assert out.token_ids.tolist() == [[5, 6, 7], [1, 2, -1], [9, -1, -1]]
    assert out.num_committed.tolist() == [3, 2, 1]


def test_a_sharp_temperature_is_greedy() -> None:
    """The sampled path and the greedy path are two codes; at temperature 1e-4 they must agree."""
    torch.manual_seed(1)
    vocab, gamma, lens = 11, 3, [4, 1, 3]
    logits, cu = torch.randn(sum(lens), vocab), torch.tensor([0, 4, 5, 8], dtype=torch.int32)
    draft_logits = torch.randn(3, gamma, vocab)
    draft_logits[0] = logits[:3]
    drafts = Drafts(draft_logits.argmax(dim=-1), draft_logits)
    positions = torch.tensor([4, 9, 2])
    sharp = accept(logits, cu, drafts, rows([1e-4] * 3), positions)
    greedy = accept(logits, cu, drafts, rows([0.0] * 3), positions)
    assert sharp.token_ids.tolist() == greedy.token_ids.tolist()


def test_mixed_rows_equal_each_alone() -> None:
    torch.manual_seed(2)
    vocab, gamma, lens = 13, 3, [4, 4, 4, 4]
    cu = torch.tensor([0, 4, 8, 12, 16], dtype=torch.int32)
    logits, draft_logits = torch.randn(16, vocab), torch.randn(4, gamma, vocab)
    drafts = Drafts(draft_logits.argmax(dim=-1), draft_logits)
    params, positions = rows([0.0, 1.0, 0.0, 0.7]), torch.tensor([3, 5, 8, 1])
    together = accept(logits, cu, drafts, params, positions)
    for i in range(4):
        index = torch.tensor([i])
        alone = accept(
            logits[4 * i : 4 * i + 4],
            torch.tensor([0, lens[i]], dtype=torch.int32),
            Drafts(drafts.token_ids[index], draft_logits[index]),
            params.select(index),
            positions[index],
        )
        assert alone.token_ids.tolist() == [together.token_ids[i].tolist()]


def test_a_draft_outside_the_kept_tokens_is_rejected() -> None:
    """top-k 1 leaves one token: any other draft has target probability 0."""
    logits = torch.tensor([[0.0, 3.0, 2.0], [1.0, 0.0, 2.0]])
    draft_logits = torch.tensor([[[0.0, 0.0, 9.0]]])
    params = rows([1.0])
    params = SamplingRows(
        params.temperature, torch.tensor([1]), params.top_p, params.min_p, params.noise_key
    )
    out = accept(
        logits,
        torch.tensor([0, 2], dtype=torch.int32),
        Drafts(torch.tensor([[2]]), draft_logits),
        params,
        torch.tensor([0]),
    )
    assert out.token_ids.tolist() == [[1, -1]]


def test_fewer_rows_commit_a_prefix_of_what_more_rows_would() -> None:
    """So a verify budget moves the end of a round, never a token that is in it."""
    torch.manual_seed(3)
    vocab, gamma, num = 6, 4, 60
    logits = torch.randn(num, gamma + 1, vocab)
    draft_logits = logits[:, :gamma] + 0.7 * torch.randn(num, gamma, vocab)
    noise = -torch.rand(num, gamma, vocab).log().neg().log()
    params = rows([0.0, 0.8, 1.0] * (num // 3))
    heat = params.temperature.clamp(min=1e-3)[:, None, None]
    drafts = Drafts((draft_logits / heat + noise).argmax(dim=-1), draft_logits)
    positions = torch.arange(num) * 5

    def commit(verify_len: int) -> list[list[int]]:
        cu = torch.arange(num + 1, dtype=torch.int32) * verify_len
        part = logits[:, :verify_len].reshape(-1, vocab)
        out = accept(part, cu, drafts, params, positions)
        return [
            ids[:n]
            for ids, n in zip(out.token_ids.tolist(), out.num_committed.tolist(), strict=True)
        ]

    whole = commit(gamma + 1)
    assert {len(ids) for ids in whole} == set(range(1, gamma + 2))
    for verify_len in range(1, gamma + 1):
        assert commit(verify_len) == [ids[:verify_len] for ids in whole]
