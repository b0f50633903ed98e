"""Which drafts stay, and what the target adds: greedy match, or rejection sampling.

Rejection sampling (Leviathan et al., 2023; Chen et al., 2023): draft k is accepted when

    u * draft_probs(d) < target_probs(d)

At the first rejection the bonus token is drawn from max(target_probs - draft_probs, 0); after all G
drafts, from the target. The output then has exactly the target's distribution, for any draft
distribution. `engine.kernels.acceptance_triton` is the same without waiting for the GPU.

A request of n < G+1 rows has n target distributions for n - 1 verified drafts. The token after them
is decided with draft n as well: it stays under the same test, or the residual is drawn. That is one
exact draw from the target, and the same token that a longer verification would put there: what a
round commits with few rows is a prefix of what it commits with many.
"""

from dataclasses import dataclass

import torch

from engine.kernels.acceptance_triton import accept_greedy_triton, accept_sampled_triton
from engine.kernels.contract import Dims
from engine.kernels.noise import ACCEPT, BONUS, uniform
from engine.kernels.sampling import SamplingRows, draw, filtered_scores, target_probs


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What one verify round commits. R requests, G = gamma."""

    token_ids: torch.Tensor  # [R, G+1] int64; row r holds num_committed[r] tokens, then -1
    num_committed: torch.Tensor  # [R] int64 in [1, G+1]: accepted drafts plus the bonus token;
    # 0 for a padding row
    finite: torch.Tensor  # [R] bool: the largest logit of each of its rows is a number


@dataclass(frozen=True, slots=True)
class Drafts:
    """What the draft proposed."""

    token_ids: torch.Tensor  # [R, G] int64
    logits: torch.Tensor | None  # [R, G, V] before temperature; None if all are greedy
    survival: torch.Tensor | None = None  # [R, G] float32, P(this one and all before it stay)


def accept(
    target_logits: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    drafts: Drafts,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool = True,
    filtered: bool = True,
) -> Acceptance:
    """Decide a round.

    Args:
        target_logits: [T, V]; request r owns rows cu[r] to cu[r+1]: its anchor, then its drafts.
            Rows past the last request are padding.
        cu_seqlens_q: [R+1] int32; at most G+1 rows a request, none for a padding row.
        drafts: What was drafted; a request of n rows reads its first n.
        params: R rows.
        positions: [R] int64, the anchors' positions.
        sampled: False promises that every request is greedy.
        filtered: False promises that no request has top-k, top-p or min-p.

    Returns:
        Tokens of the round. Where `finite` is False they mean nothing.
    """
    dims = Dims()
    dims.check("target_logits", target_logits, "T V")
    dims.check("cu_seqlens_q", cu_seqlens_q, "R+1", torch.int32)
    dims.check("draft_ids", drafts.token_ids, "R G", torch.int64)
    dims.check("positions", positions, "R", torch.int64)
    if drafts.logits is not None:
        dims.check("draft_logits", drafts.logits, "R G V")
    if not target_logits.is_cuda:
        return accept_ref(target_logits, cu_seqlens_q, drafts, params, positions, sampled=sampled)
    return accept_triton(
        target_logits, cu_seqlens_q, drafts, params, positions, sampled=sampled, filtered=filtered
    )


def accept_ref(
    target_logits: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    drafts: Drafts,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool = True,
) -> Acceptance:
    """`accept` in torch: the definition a kernel is held to."""
    out = accept_greedy_ref(target_logits.argmax(dim=-1), cu_seqlens_q, drafts.token_ids)
    out.finite.copy_(_all_finite(target_logits, cu_seqlens_q))
    if not sampled:
        return out
    rows = ((params.temperature > 0) & (cu_seqlens_q.diff() > 0)).nonzero()[:, 0]
    if rows.numel() == 0:
        return out
    if drafts.logits is None:
        raise ValueError("drafts.logits: needed for rows with temperature > 0, got None")
    part = accept_sampled_ref(target_logits, cu_seqlens_q, drafts, params, positions, rows=rows)
    out.token_ids[rows] = part.token_ids
    out.num_committed[rows] = part.num_committed
    return out


def accept_triton(
    target_logits: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    drafts: Drafts,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    sampled: bool = True,
    filtered: bool = True,
) -> Acceptance:
    """`accept` without waiting; drafts without logits promise greedy requests as well."""
    if target_logits.stride(-1) != 1:
        target_logits = target_logits.contiguous()
    if not sampled or drafts.logits is None:
        return Acceptance(*accept_greedy_triton(target_logits, cu_seqlens_q, drafts.token_ids))
    temperature = params.temperature
    if filtered:
        token = torch.arange(len(target_logits), device=target_logits.device)
        request = torch.searchsorted(cu_seqlens_q[1:].long(), token, right=True)
        request = request.clamp(max=len(temperature) - 1)
        target_logits, _ = filtered_scores(target_logits, params.select(request))
        temperature = (temperature > 0).float()
    return Acceptance(
        *accept_sampled_triton(
            target_logits,
            cu_seqlens_q,
            drafts.token_ids,
            drafts.logits,
            temperature,
            params.temperature,
            params.noise_key,
            positions,
            (ACCEPT, BONUS),
        )
    )


def _all_finite(logits: torch.Tensor, cu_seqlens_q: torch.Tensor) -> torch.Tensor:
    """[R] bool: is the largest logit of every row of a request a number?"""
    bad = (~logits.amax(dim=-1).isfinite()).long()
    total = torch.nn.functional.pad(bad.cumsum(0), (1, 0))[cu_seqlens_q.long()]
    return total.diff() == 0


def accept_greedy_ref(
    target_ids: torch.Tensor, cu_seqlens_q: torch.Tensor, draft_ids: torch.Tensor
) -> Acceptance:
    """Keep drafts while they are the target's own choice; `finite` is for the caller to fill.

    Args:
        target_ids: [T] int64, argmax of the target's logits.
        cu_seqlens_q: [R+1] int32.
        draft_ids: [R, G] int64.
    """
    begin, lens = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    column = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    at = (begin[:, None] + torch.minimum(column, lens[:, None] - 1)).clamp(min=0)
    wanted = target_ids[at]  # [R, G+1]; past a request's rows: its last, never read
    ok = (wanted[:, :-1] == draft_ids) & (column[:-1] < lens[:, None] - 1)
    num_committed = torch.where(lens > 0, ok.long().cumprod(dim=1).sum(dim=1) + 1, 0)
    return Acceptance(
        torch.where(column < num_committed[:, None], wanted, -1),
        num_committed,
        torch.ones_like(lens, dtype=torch.bool),
    )


def accept_sampled_ref(
    target_logits: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    drafts: Drafts,
    params: SamplingRows,
    positions: torch.Tensor,
    rows: torch.Tensor,
) -> Acceptance:
    """Rejection sampling of the requests `rows` [R'] int64: temperature > 0, at least one row."""
    assert drafts.logits is not None
    params, positions = params.select(rows), positions[rows]
    begin, lens = cu_seqlens_q[rows].long(), cu_seqlens_q.diff().long()[rows]
    gamma = drafts.token_ids.shape[1]
    column = torch.arange(gamma + 1, device=rows.device)
    at = begin[:, None] + torch.minimum(column, lens[:, None] - 1)
    flat = torch.arange(len(rows), device=rows.device).repeat_interleave(gamma + 1)
    probs = target_probs(target_logits[at.flatten()], params.select(flat))
    probs = probs.view(len(rows), gamma + 1, -1)
    draft_probs = (drafts.logits[rows] / params.temperature[:, None, None]).softmax(dim=-1)
    uniforms = uniform(
        params.noise_key[:, None].expand(-1, gamma),
        positions[:, None] + 1 + column[:-1],
        ACCEPT,
    )
    draft_ids = drafts.token_ids[rows]
    stay = count_accepted(draft_ids, draft_probs, probs, lens, uniforms)
    weights = bonus_weights(draft_probs, probs, stay)
    bonus = draw(weights, params.noise_key, positions + 1 + stay, BONUS)
    token_ids = torch.nn.functional.pad(draft_ids, (0, 1))
    token_ids = token_ids.scatter_(1, stay[:, None], bonus[:, None])
    committed = torch.minimum(stay + 1, lens)
    token_ids = torch.where(column < committed[:, None], token_ids, -1)
    return Acceptance(token_ids, committed, torch.ones_like(stay, dtype=torch.bool))


def count_accepted(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    probs: torch.Tensor,
    verify_lens: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Drafts before the first rejection, of those with a target distribution.

    Args:
        draft_ids: [R, G] int64.
        draft_probs: [R, G, V] float32, the distributions the drafts were drawn from.
        probs: [R, G+1, V] float32, the target's.
        verify_lens: [R] int64 in [1, G+1], anchor included.
        uniforms: [R, G] float32 in (0, 1).

    Returns:
        [R] int64 in [0, min(verify_lens, G)]; verify_lens itself means that the last row's token is
        the draft, too, and nothing is to be drawn.
    """
    gamma = draft_ids.shape[1]
    p_draft = draft_probs.gather(2, draft_ids[..., None])[..., 0]
    p_target = probs[:, :gamma].gather(2, draft_ids[..., None])[..., 0]
    decided = torch.arange(gamma, device=draft_ids.device) < verify_lens[:, None]
    # multiply, never divide: a draft of probability 0 cannot have been drawn
    ok = (uniforms * p_draft < p_target) & decided
    return ok.long().cumprod(dim=1).sum(dim=1)


def bonus_weights(
    draft_probs: torch.Tensor, probs: torch.Tensor, stay: torch.Tensor
) -> torch.Tensor:
    """Unnormalised distribution of the token after the drafts that stay.

    Args:
        draft_probs: [R, G, V] float32.
        probs: [R, G+1, V] float32.
        stay: [R] int64, as `count_accepted`.

    Returns:
        [R, V] float32 >= 0, not all 0 in a row.
    """
    at = stay[:, None, None].expand(-1, 1, probs.shape[-1])
    target_at = probs.gather(1, at)[:, 0]
    draft_at = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1)).gather(1, at)[:, 0]
    residual = (target_at - draft_at).clamp(min=0.0)
    # a rejection means target < draft somewhere, so > somewhere else; rounding may hide it
    use = (stay < draft_probs.shape[1]) & (residual.sum(dim=-1) > 0)
    return torch.where(use[:, None], residual, target_at)
