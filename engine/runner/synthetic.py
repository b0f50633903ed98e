"""Made-up acceptance, for benchmarks of random weights, which accept nothing."""

import torch

from engine.kernels.acceptance import Acceptance, Drafts
from engine.kernels.noise import ACCEPT, uniform


def acceptance_rate(mean: float, gamma: int) -> float:
    """A in [0, 1] of which 1 + a + ... + a^G = mean: each draft stays with the same probability."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        total = sum(middle**k for k in range(gamma + 1))
        low, high = (middle, high) if total < mean else (low, middle)
    return high


def synthetic_survival(mean: float, like: torch.Tensor, gamma: int) -> torch.Tensor:
    """[R, G] float32, what `synthesize` makes true for each of the R rows of `like`."""
    column = torch.arange(1, gamma + 1, device=like.device)
    return (acceptance_rate(mean, gamma) ** column).float().expand(len(like), -1).contiguous()


def synthesize(
    real: Acceptance,
    drafts: Drafts,
    verify_lens: torch.Tensor,
    mean: float,
    keys: torch.Tensor,
    positions: torch.Tensor,
) -> Acceptance:
    """Pretend that drafts stay, so often that `mean` tokens a full round are committed.

    Every draft stays with one probability, whatever the one before it was, as far as it was
    verified.

    Args:
        real: What was decided; its last token is kept as the bonus token.
        drafts: What was drafted.
        verify_lens: [R] int32.
        mean: Committed tokens a round when every draft is verified, in [1, G+1].
        keys: [R] int64, noise keys.
        positions: [R] int64, the anchors' positions.
    """
    gamma = drafts.token_ids.shape[1]
    column = torch.arange(gamma + 1, device=keys.device)
    noise = uniform(
        keys[:, None].expand(-1, gamma), positions[:, None] + 1 + column[:-1], ACCEPT, 1
    )
    stays = (noise < acceptance_rate(mean, gamma)) & (column[:-1] < verify_lens[:, None] - 1)
    count = stays.long().cumprod(dim=1).sum(dim=1) + 1
    at = (real.num_committed - 1).clamp(min=0)[:, None]
    bonus = real.token_ids.gather(1, at).clamp(min=0)
    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1))
    ids = torch.where(column == count[:, None] - 1, bonus, ids)
    return Acceptance(torch.where(column < count[:, None], ids, -1), count, real.finite)
