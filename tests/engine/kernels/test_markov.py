"""The chain against the formulas written out one request and one position at a time."""

import pytest
import torch

from engine.kernels.linear import Linear
from engine.kernels.markov import MarkovWeights, markov_chain, scatter_logits
from engine.kernels.sampling import SamplingRows

V, R, G, H, RANK = 23, 3, 4, 8, 5


def greedy_rows(n: int, temperature: float = 0.0) -> SamplingRows:
    return SamplingRows(
        torch.full((n,), temperature),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n),
        torch.zeros(n),
        torch.arange(n) + 5,
    )


def make(kind: str, draft_vocab: int = V) -> tuple[MarkovWeights, dict[str, torch.Tensor]]:
    t = {
        "w1": torch.randn(V, RANK),
        "w2": torch.randn(draft_vocab, RANK),
        "gate": torch.randn(RANK, H + RANK),
        "gate_b": torch.randn(RANK),
        "joint": torch.randn(3 * RANK, 2 * RANK + H),
        "joint_b": torch.randn(3 * RANK),
    }
    inner = {
        "gated": Linear(t["gate"].clone(), t["gate_b"]),
        "rnn": Linear(t["joint"].clone(), t["joint_b"]),
    }.get(kind)
    if kind == "none":
        return MarkovWeights("none", None, None, None), t
    return MarkovWeights(kind, t["w1"], Linear(t["w2"].clone()), inner), t  # type: ignore[arg-type]


def expected(
    kind: str, t: dict[str, torch.Tensor], base: torch.Tensor, hidden: torch.Tensor, anchor: int
) -> list[int]:
    prev, state, ids = anchor, torch.zeros(RANK), []
    for k in range(G):
        e, h = t["w1"][prev], hidden[k]
        if kind == "none":
            bias = torch.zeros(V)
        elif kind == "vanilla":
            bias = t["w2"] @ e
        elif kind == "gated":
            bias = t["w2"] @ (torch.sigmoid(t["gate"] @ torch.cat((h, e)) + t["gate_b"]) * e)
        else:
            z = t["joint"] @ torch.cat((state, e, h)) + t["joint_b"]
            u, c, o = z[:RANK], z[RANK : 2 * RANK], z[2 * RANK :]
            bias = t["w2"] @ torch.tanh(o)
            state = torch.sigmoid(u) * state + (1 - torch.sigmoid(u)) * torch.tanh(c)
        prev = int((base[k] + bias).argmax())
        ids.append(prev)
    return ids


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn"])
def test_greedy_chain(kind: str) -> None:
    weights, t = make(kind)
    base, hidden, anchors = torch.randn(R, G, V), torch.randn(R, G, H), torch.tensor([3, 0, 22])
    chain = markov_chain(
        base, hidden, anchors, weights, None, greedy_rows(R), torch.tensor([1, 2, 3]), sampled=False
    )
    for r in range(R):
        assert chain.token_ids[r].tolist() == expected(kind, t, base[r], hidden[r], int(anchors[r]))
    if kind != "none":
        prev = torch.cat((anchors[:, None], chain.token_ids[:, :-1]), dim=1)
        assert chain.prev_embeds is not None
        torch.testing.assert_close(chain.prev_embeds, t["w1"][prev])


def test_reduced_vocabulary_chains_in_target_ids() -> None:
    """d2t maps a draft id before it becomes the next position's predecessor."""
    draft_to_target = torch.tensor([2, 3, 7, 11, 22])
    weights, t = make("vanilla", draft_vocab=5)
    base, hidden = torch.randn(R, G, 5), torch.randn(R, G, H)
    anchors = torch.tensor([1, 2, 3])
    chain = markov_chain(
        base, hidden, anchors, weights, draft_to_target, greedy_rows(R), anchors, sampled=True
    )
    for r in range(R):
        prev = int(anchors[r])
        for k in range(G):
            prev = int(draft_to_target[(base[r, k] + t["w2"] @ t["w1"][prev]).argmax()])
            assert int(chain.token_ids[r, k]) == prev
    assert chain.logits is not None
    wide = scatter_logits(chain.logits, draft_to_target, V)
    assert torch.equal(wide[..., draft_to_target], chain.logits)
    outside = [i for i in range(V) if i not in draft_to_target.tolist()]
    assert bool((wide[..., outside] == float("-inf")).all())


def test_sampled_chain_draws_from_the_softmax() -> None:
    """40,000 keys, first position: every frequency within 5 sigma, odds < 6e-7 a cell."""
    n = 40_000
    weights, t = make("vanilla")
    base = torch.randn(1, 1, V)
    chain = markov_chain(
        base.expand(n, 1, V),
        torch.zeros(n, 1, H),
        torch.full((n,), 4),
        weights,
        None,
        greedy_rows(n, temperature=0.8),
        torch.full((n,), 9),
        sampled=True,
    )
    probs = ((base[0, 0] + t["w2"] @ t["w1"][4]) / 0.8).softmax(dim=0)
    counts = torch.bincount(chain.token_ids[:, 0], minlength=V)
    sigma = (n * probs * (1 - probs)).sqrt()
    assert bool(((counts - n * probs).abs() < 5 * sigma + 1).all())
