"""What makes tokens of logits: the Markov chain, acceptance, sampling."""

import torch

from engine.kernel_bench.case import Case, Inputs, equal, first
from engine.kernel_bench.layer_cases import randn
from engine.kernels.acceptance import Acceptance, Drafts, accept, accept_ref
from engine.kernels.linear import Linear
from engine.kernels.markov import Chain, MarkovWeights, markov_chain
from engine.kernels.noise import BONUS, gumbel_ref
from engine.kernels.sampling import SamplingRows, sample
from engine.models.config import DraftSpec
from engine.models.layers import Placement


def rows_of(count: int, temperature: float, device: torch.device) -> SamplingRows:
    """Sampling parameters of R requests, without filters."""
    ones = torch.ones(count, device=device)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    keys = torch.arange(count, device=device) * 104729 - 5
    return SamplingRows(ones * temperature, zeros, ones, ones * 0, keys)


def markov_case(count: int, gamma: int, spec: DraftSpec, at: Placement) -> Case:
    """A vanilla chain of greedy requests. Inputs: base logits [R, G, Vd], W1, W2, anchors."""
    vocab, rank = spec.draft_vocab_size, spec.markov_rank

    def make() -> Inputs:
        w1 = randn(at, vocab, rank)
        w2 = randn(at, vocab, rank, scale=rank**-0.5)
        anchors = torch.randint(0, vocab, (count,), device=at.device)
        return randn(at, count, gamma, vocab), w1, w2, Linear(w2, pack=False), anchors

    def run(inputs: Inputs) -> Chain:
        base, w1, _, w2, anchors = inputs
        weights = MarkovWeights("vanilla", w1, w2, None)
        hidden = base[..., :1]
        params = rows_of(count, 0.0, at.device)
        return markov_chain(base, hidden, anchors, weights, None, params, anchors, sampled=False)

    def check(inputs: Inputs, chain: Chain) -> str | None:
        """Along the op's own chain, each choice is the best but for rounding."""
        base, w1, w2, _, previous = inputs
        for k in range(gamma):
            logits = base[:, k].float() + w1[previous].float() @ w2.float().t()
            previous = chain.token_ids[:, k]
            if bool(((previous < 0) | (previous >= vocab)).any()):
                return f"a token of position {k} is outside the vocabulary"
            short = logits.amax(dim=1) - logits.gather(1, previous[:, None])[:, 0]
            allowed = 2 * torch.finfo(at.dtype).eps * logits.abs().amax(dim=1)
            if not bool((short <= allowed).all()):
                return f"position {k} misses the best logit by {float(short.max()):.3g}"
        return None

    item = at.dtype.itemsize
    return Case(
        op="markov_chain",
        shape=f"{count} x {gamma} x {vocab}, rank {rank}",
        make=make,
        run=run,
        check=check,
        nbytes=gamma * (vocab * rank + count * vocab) * item,
        flops=2.0 * gamma * count * vocab * rank,
    )


def accept_case(count: int, gamma: int, vocab: int, at: Placement) -> Case:
    """Greedy requests, all drafts verified. Inputs: logits [T, V], cu, drafts; about half right."""
    width = gamma + 1

    def make() -> Inputs:
        logits = randn(at, count * width, vocab)
        right = logits.argmax(dim=-1).view(count, width)[:, :gamma]
        keep = torch.rand(right.shape, device=at.device) < 0.8
        drafts = Drafts(torch.where(keep, right, right // 2), None)
        cu = torch.arange(count + 1, dtype=torch.int32, device=at.device) * width
        return logits, cu, drafts, rows_of(count, 0.0, at.device), cu[:-1].long()

    def check(inputs: Inputs, out: Acceptance) -> str | None:
        want = accept_ref(*inputs, sampled=False)
        return first(
            equal("tokens", out.token_ids, want.token_ids),
            equal("counts", out.num_committed, want.num_committed),
            equal("finite", out.finite, want.finite),
        )

    return Case(
        op="accept",
        shape=f"{count} x {width} x {vocab}, greedy",
        make=make,
        run=lambda inputs: accept(*inputs, sampled=False, filtered=False),
        check=check,
        nbytes=count * width * vocab * at.dtype.itemsize,
    )


def sample_case(count: int, vocab: int, at: Placement) -> Case:
    """Requests at temperature 0.8, without filters. Inputs: logits [R, V], rows, positions."""

    def make() -> Inputs:
        positions = torch.arange(count, device=at.device) + 7
        return randn(at, count, vocab), rows_of(count, 0.8, at.device), positions

    def check(inputs: Inputs, ids: torch.Tensor) -> str | None:
        logits, params, positions = inputs
        noise = gumbel_ref(params.noise_key, positions, BONUS, vocab, positions * 0)
        score = logits.float() / 0.8 + noise
        short = score.amax(dim=1) - score.gather(1, ids[:, None])[:, 0]
        worst = float(short.max())
        return None if worst <= 1e-5 else f"a draw misses the best score by {worst:.3g}"

    return Case(
        op="sample",
        shape=f"{count} x {vocab}, temperature 0.8",
        make=make,
        run=lambda inputs: sample(*inputs, sampled=True, filtered=False),
        check=check,
        nbytes=count * vocab * at.dtype.itemsize,
    )
