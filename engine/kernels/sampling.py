"""From logits to the distribution a request asked for, and to tokens.

temperature, then top-k, top-p, min-p (each on what the one before left), renormalised, float32.
Equal probabilities are ordered by token id: of two equals the lower id stays.
"""

from dataclasses import dataclass

import torch

from engine.kernels.contract import Dims
from engine.kernels.noise import BONUS, gumbel
from engine.kernels.sampling_triton import best_ids_triton


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters by row. Greedy rows have temperature 0."""

    temperature: torch.Tensor  # [R] float32
    top_k: torch.Tensor  # [R] int64, 0 = all
    top_p: torch.Tensor  # [R] float32
    min_p: torch.Tensor  # [R] float32
    noise_key: torch.Tensor  # [R] int64

    def select(self, index: torch.Tensor) -> "SamplingRows":
        """Rows at `index` [R'] int64; repeats allowed."""
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
            self.noise_key[index],
        )


def target_probs(
    logits: torch.Tensor, params: SamplingRows, *, filtered: bool = True
) -> torch.Tensor:
    """Distributions of sampled rows; never waits for a GPU.

    Args:
        logits: [R, V], any float dtype.
        params: R rows. Rows with temperature 0 get some distribution; nobody reads it.
        filtered: False promises that no row has top-k, top-p or min-p: no sort.

    Returns:
        [R, V] float32, rows sum to 1.
    """
    Dims().check("logits", logits, "R V")
    return target_probs_ref(logits, params, filtered=filtered)


def target_probs_ref(
    logits: torch.Tensor, params: SamplingRows, *, filtered: bool = True
) -> torch.Tensor:
    """`target_probs` in torch, on any device: a sort is what it costs."""
    vocab = logits.shape[-1]
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    probs = (logits.float() / temperature[:, None]).softmax(dim=-1)
    unfiltered = (params.top_k <= 0) & (params.top_p >= 1.0) & (params.min_p <= 0.0)
    # a GPU would have to be waited for: there the caller says so
    if not filtered or (not logits.is_cuda and bool(unfiltered.all())):
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=probs.device)
    limit = torch.where(params.top_k > 0, params.top_k, vocab)
    keep = rank < limit[:, None]
    kept = ranked * keep
    kept = kept / kept.sum(dim=-1, keepdim=True)
    before = kept.cumsum(dim=-1) - kept
    keep &= (before < params.top_p[:, None]) | (params.top_p >= 1.0)[:, None]
    keep &= ranked >= params.min_p[:, None] * ranked[:, :1]
    keep[:, 0] = True
    ranked = torch.where(keep, ranked, 0.0)
    out = torch.zeros_like(probs).scatter_(1, order, ranked)
    out /= out.sum(dim=-1, keepdim=True)
    return torch.where(unfiltered[:, None], probs, out)


def draw(
    weights: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, stream: int
) -> torch.Tensor:
    """One token per row, with probability proportional to its weight.

    Args:
        weights: [R, V] float32 >= 0, not all 0 in a row.
        keys: [R] int64, Request.noise_key.
        positions: [R] int64, position of the token drawn.
        stream: Noise stream.

    Returns:
        [R] int64.
    """
    noise = gumbel(keys, positions, stream, weights.shape[-1])
    return (weights.log() + noise).argmax(dim=-1)


def filtered_scores(
    logits: torch.Tensor, params: SamplingRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filters as scores: what an argmax with noise takes instead of logits, and its temperatures.

    Args:
        logits: [R, V].
        params: R rows.

    Returns:
        [R, V] float32: log of `target_probs`, or the logits where temperature is 0; and [R]
        float32, 1 or 0.
    """
    hot = params.temperature > 0
    probs = target_probs(logits, params)
    return torch.where(hot[:, None], probs.log(), logits.float()), hot.float()


def sample(
    logits: torch.Tensor,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool = True,
    filtered: bool = True,
) -> torch.Tensor:
    """The target's own token per row (no draft): greedy or drawn from the BONUS stream.

    Args:
        logits: [R, V].
        params: R rows.
        positions: [R] int64, position of the token sampled.
        sampled: False promises that every row is greedy.
        filtered: False promises that no row has top-k, top-p or min-p.

    Returns:
        [R] int64. Equal logits: the lowest id.
    """
    dims = Dims()
    dims.check("logits", logits, "R V")
    dims.check("positions", positions, "R", torch.int64)
    if not logits.is_cuda:
        return sample_ref(logits, params, positions) if sampled else logits.argmax(dim=-1)
    return sample_triton(logits, params, positions, sampled=sampled, filtered=filtered)


def sample_ref(logits: torch.Tensor, params: SamplingRows, positions: torch.Tensor) -> torch.Tensor:
    """`sample` in torch: the definition a kernel is held to."""
    tokens = logits.argmax(dim=-1)
    sampled = (params.temperature > 0).nonzero()[:, 0]
    if sampled.numel():
        rows = params.select(sampled)
        probs = target_probs(logits[sampled], rows)
        tokens[sampled] = draw(probs, rows.noise_key, positions[sampled], BONUS)
    return tokens


def sample_triton(
    logits: torch.Tensor,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool = True,
    filtered: bool = True,
) -> torch.Tensor:
    """`sample` as two launches; with filters, torch's sort goes before them."""
    if not sampled:
        return best_ids_triton(logits)
    scores, temperature = logits, params.temperature
    if filtered:
        scores, temperature = filtered_scores(logits, params)
    return best_ids_triton(scores, temperature, params.noise_key, positions, BONUS)
