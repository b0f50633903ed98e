"""The Markov chain of a DSpark draft: left to right over one block's base logits.

    logits_k = base_k + W2 f(W1[prev_k], hidden_k, state_k)
    prev_{k+1} = d_k = argmax of logits_k, or a draw

    vanilla  f = e
    gated    f = sigmoid(A [hidden; e] + a) * e
    rnn      [u; c; o] = J [s; e; hidden] + j,  f = tanh(o),
             s' = sigmoid(u) s + (1 - sigmoid(u)) tanh(c)

with e = W1[prev], prev_0 the anchor, s_0 = 0. Reads W2 once a position. After the DeepSpec heads.
`engine.kernels.markov_triton` holds the kernels.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.contract import Dims
from engine.kernels.linear import Linear
from engine.kernels.markov_triton import Draws, MarkovChain
from engine.kernels.noise import DRAFT, gumbel
from engine.kernels.sampling import SamplingRows
from engine.kernels.sampling_triton import best_ids_triton


@dataclass(frozen=True, slots=True)
class MarkovWeights:
    """One head. V input vocabulary, Vd draft vocabulary, r rank, H hidden."""

    kind: Literal["none", "vanilla", "gated", "rnn"]
    w1: torch.Tensor | None  # [V, r]
    w2: Linear | None  # r -> Vd
    inner: Linear | None  # gated: H+r -> r; rnn: 2r+H -> 3r

    def features(
        self, prev_embed: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What W2 takes at one position.

        Args:
            prev_embed: [R, r], W1 of the token before.
            hidden: [R, H], the position's final hidden state.
            state: [R, r], rnn only.

        Returns:
            f [R, r] and the next state.
        """
        if self.kind == "vanilla":
            return prev_embed, None
        assert self.inner is not None
        if self.kind == "gated":
            gate = self.inner(torch.cat((hidden, prev_embed), dim=-1)).sigmoid()
            return gate * prev_embed, None
        assert state is not None
        update, candidate, out = self.inner(torch.cat((state, prev_embed, hidden), dim=-1)).chunk(
            3, dim=-1
        )
        keep = update.sigmoid()
        return out.tanh(), keep * state + (1 - keep) * candidate.tanh()


@dataclass(frozen=True, slots=True)
class Chain:
    """The chain's result."""

    token_ids: torch.Tensor  # [R, G] int64, target vocabulary
    logits: torch.Tensor | None  # [R, G, Vd] before temperature; None if all are greedy
    prev_embeds: torch.Tensor | None  # [R, G, r], W1 of each position's predecessor


def markov_chain(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    weights: MarkovWeights,
    draft_to_target: torch.Tensor | None,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool,
) -> Chain:
    """Draft G tokens a request.

    Args:
        base_logits: [R, G, Vd].
        hidden: [R, G, H], final-normed draft hidden states.
        anchors: [R] int64.
        weights: The head.
        draft_to_target: [Vd] int64 target id of each draft id; None = identity.
        params: R rows.
        positions: [R] int64, the anchors' positions.
        sampled: False promises that every row is greedy: no noise, no logits kept.
    """
    dims = Dims()
    dims.check("base_logits", base_logits, "R G W")
    dims.check("hidden", hidden, "R G H")
    dims.check("anchors", anchors, "R", torch.int64)
    dims.check("positions", positions, "R", torch.int64)
    impl = markov_chain_triton if base_logits.is_cuda else markov_chain_ref
    return impl(
        base_logits, hidden, anchors, weights, draft_to_target, params, positions, sampled=sampled
    )


def markov_chain_ref(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    weights: MarkovWeights,
    draft_to_target: torch.Tensor | None,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool,
) -> Chain:
    """`markov_chain` in torch: the definition a kernel is held to. Keeps logits in float32."""
    prev, state = anchors, _first_state(weights, hidden)
    ids, kept, embeds = [], [], []
    for k in range(base_logits.shape[1]):
        logits = base_logits[:, k]
        if weights.w1 is not None:
            assert weights.w2 is not None
            embed = weights.w1[prev]
            f, state = weights.features(embed, hidden[:, k], state)
            logits = logits + weights.w2(f)
            embeds.append(embed)
        choice = _choose(logits, params, positions, k, draft_to_target) if sampled else None
        prev = logits.argmax(dim=-1) if choice is None else choice
        if draft_to_target is not None:
            prev = draft_to_target[prev]
        ids.append(prev)
        if sampled:
            kept.append(logits.float())
    return Chain(
        torch.stack(ids, dim=1),
        torch.stack(kept, dim=1) if sampled else None,
        torch.stack(embeds, dim=1) if embeds else None,
    )


def markov_chain_triton(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    weights: MarkovWeights,
    draft_to_target: torch.Tensor | None,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool,
) -> Chain:
    """`markov_chain` fused; keeps logits in base_logits' dtype."""
    if weights.w1 is None or weights.w2 is None:
        return _independent_triton(base_logits, draft_to_target, params, positions, sampled)
    if weights.w2.packed or weights.w2.bias is not None:
        raise ValueError("weights.w2: the kernel takes a plain matrix without a bias")
    draws = None
    if sampled:
        kept = torch.empty(base_logits.shape, dtype=base_logits.dtype, device=base_logits.device)
        draws = Draws(params.temperature, params.noise_key, positions, kept, DRAFT)
    chain = MarkovChain(base_logits, anchors, weights.w1, weights.w2.weight, draft_to_target, draws)
    state, gamma = _first_state(weights, hidden), base_logits.shape[1]
    for k in range(gamma):
        f, state = weights.features(chain.next(k), hidden[:, k], state)
        chain.step(k, f)
    if gamma:
        chain.next(gamma)
    return Chain(chain.token_ids, draws.logits if draws else None, chain.prev_embeds)


def _independent_triton(
    base_logits: torch.Tensor,
    draft_to_target: torch.Tensor | None,
    params: SamplingRows,
    positions: torch.Tensor,
    sampled: bool,
) -> Chain:
    """No head: every position chooses by itself, all in two launches."""
    num_reqs, gamma, vocab_size = base_logits.shape
    rows = base_logits.reshape(-1, vocab_size)
    if sampled:
        at = positions[:, None] + 1 + torch.arange(gamma, device=positions.device)
        ids = best_ids_triton(
            rows,
            params.temperature.repeat_interleave(gamma),
            params.noise_key.repeat_interleave(gamma),
            at.flatten(),
            DRAFT,
            positions.repeat_interleave(gamma),
        )
    else:
        ids = best_ids_triton(rows)
    if draft_to_target is not None:
        ids = draft_to_target[ids]
    return Chain(ids.view(num_reqs, gamma), base_logits if sampled else None, None)


def _first_state(weights: MarkovWeights, hidden: torch.Tensor) -> torch.Tensor | None:
    """[R, r] zeros, rnn only."""
    if weights.kind != "rnn":
        return None
    assert weights.w1 is not None
    shape = (hidden.shape[0], weights.w1.shape[1])
    return torch.zeros(shape, device=hidden.device, dtype=hidden.dtype)


def _choose(
    logits: torch.Tensor,
    params: SamplingRows,
    positions: torch.Tensor,
    k: int,
    draft_to_target: torch.Tensor | None,
) -> torch.Tensor:
    """Draft id per row: argmax where temperature is 0, else a draw from softmax(logits / T)."""
    cold = params.temperature <= 0
    temperature = torch.where(cold, 1.0, params.temperature)
    # the anchor's position is in the counter: a position drafted again gets fresh noise
    noise = gumbel(params.noise_key, positions + 1 + k, DRAFT, logits.shape[-1], rounds=positions)
    noise = torch.where(cold[:, None], 0.0, noise)
    return (logits.float() / temperature[:, None] + noise).argmax(dim=-1)


def scatter_logits(
    logits: torch.Tensor, draft_to_target: torch.Tensor | None, vocab_size: int
) -> torch.Tensor:
    """Spread [R, G, Vd] over the target's vocabulary: [R, G, V], -inf where the draft has none."""
    if draft_to_target is None and logits.shape[-1] == vocab_size:
        return logits
    wide = logits.new_full((*logits.shape[:2], vocab_size), float("-inf"))
    if draft_to_target is None:
        wide[..., : logits.shape[-1]] = logits[..., :vocab_size]
        return wide
    wide[..., draft_to_target] = logits
    return wide
