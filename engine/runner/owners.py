"""Batch-sharded sampling: each rank decides for the requests it owns, then all know.

Ranks hold parts of the vocabulary, decisions need whole rows. One exchange brings each row to its
owner alone; what comes back is a few integers a request. A rank without a request of its own takes
part all the same. See `engine.runner.ownership`.
"""

from dataclasses import dataclass

import torch

from engine.dist.collectives import Collectives
from engine.dist.reshard import exchange_vocab, gather_vocab
from engine.kernels.acceptance import Acceptance, Drafts, accept
from engine.kernels.markov import Chain, scatter_logits
from engine.kernels.sampling import SamplingRows, sample
from engine.models.interface import Draft, Target
from engine.runner.ownership import Ownership


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a batch asks of sampling; the flags are known to the host before a step."""

    params: SamplingRows  # R rows
    sampled: bool
    """Is any temperature > 0?"""

    filtered: bool
    """Has any of those top-k, top-p or min-p?"""

    def of(self, index: torch.Tensor) -> SamplingRows:
        """Rows `index` [c]; a greedy batch needs none, and keeps what it has."""
        return self.params.select(index) if self.sampled else self.params


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a draft gives to the rest of the round."""

    drafts: Drafts
    """Tokens of all requests; logits of this rank's requests only: [c, G, V]."""

    confidence: torch.Tensor | None
    """[R, G] float32, before calibration; None without a head."""


class Owners:
    """What ranks decide for each other; of one rank, for itself.

    Args:
        target: Whose logits decide.
        draft: What drafts, if anything.
        ranks: Who takes part.
        device: Where batches are.
    """

    def __init__(
        self, target: Target, draft: Draft | None, ranks: Collectives, device: torch.device
    ) -> None:
        self.ranks = ranks
        self._target, self._draft, self._device = target, draft, device
        self._dealt: dict[int, Ownership] = {}

    def deal(self, num_reqs: int) -> Ownership:
        """Who owns what in a batch of R requests; made at the first of them, before any capture."""
        found = self._dealt.get(num_reqs)
        if found is None:
            found = Ownership(num_reqs, self.ranks.rank, self.ranks.size, self._device)
            self._dealt[num_reqs] = found
        return found

    def accept(
        self,
        hidden: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        drafts: Drafts,
        positions: torch.Tensor,
        sampling: Sampling,
    ) -> Acceptance:
        """`engine.kernels.acceptance.accept` from hidden states, each request at its owner.

        Args:
            hidden: [T, H], final-normed; request r owns rows cu[r] to cu[r+1].
            cu_seqlens_q: [R+1] int32.
            drafts: Tokens [R, G] of all requests; logits [c, G, V] of this rank's.
            positions: [R] int64, the anchors' positions.
            sampling: Of the R requests.
        """
        flags = {"sampled": sampling.sampled, "filtered": sampling.filtered}
        if self.ranks.size == 1:
            logits = self._target.logits(hidden)
            return accept(logits, cu_seqlens_q, drafts, sampling.params, positions, **flags)
        num_reqs, gamma = drafts.token_ids.shape
        deal = self.deal(num_reqs)
        owned = deal.rows(cu_seqlens_q, len(hidden), gamma + 1)
        decided = accept(
            self._exchange(hidden[owned.token]),
            owned.cu_seqlens,
            Drafts(drafts.token_ids[deal.mine], drafts.logits),
            sampling.of(deal.mine),
            positions[deal.mine],
            **flags,
        )
        columns = (decided.num_committed[:, None], decided.finite[:, None], decided.token_ids)
        told = deal.in_batch_order(self.ranks.all_gather(torch.cat(columns, dim=1)))
        # kernels read rows one after another
        committed, finite = told[:, 0].contiguous(), told[:, 1].bool()
        return Acceptance(told[:, 2:].contiguous(), committed, finite)

    def first_tokens(
        self, hidden: torch.Tensor, positions: torch.Tensor, sampling: Sampling
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample what follows finished prompts, each at its owner.

        Args:
            hidden: [R, H], final-normed hidden states of the prompts' last tokens.
            positions: [R] int64 of the tokens to sample.
            sampling: Of the R requests.

        Returns:
            Logits [c, V] of this rank's requests (the first one is rank 0's first), and [R, 2]
            int64: 1 and the token, or 0 where logits are not finite.
        """
        deal = self.deal(len(hidden))
        logits = self._exchange(hidden[deal.order])
        tokens = sample(
            logits,
            sampling.of(deal.mine),
            positions[deal.mine],
            sampled=sampling.sampled,
            filtered=sampling.filtered,
        )
        ok = logits.amax(dim=-1).isfinite().long()
        told = self.ranks.all_gather(torch.stack((ok, tokens), dim=1))
        return logits, deal.in_batch_order(told)

    def draft_sharded(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        sampling: Sampling,
    ) -> Drafted:
        """The Markov loop at each request's owner.

        Args:
            hidden: [R, G, H], rows that predict.
            anchors: [R] int64.
            positions: [R] int64, the anchors' positions.
            sampling: Of the R requests.
        """
        assert self._draft is not None
        draft, gamma, deal = self._draft, hidden.shape[1], self.deal(len(hidden))
        mine, own = deal.mine, hidden[deal.mine]
        part = draft.base_logits(hidden[deal.order].flatten(0, 1))
        base = exchange_vocab(part, draft.num_logits, self.ranks)
        chain = draft.chain(
            base.view(deal.capacity, gamma, -1),
            own,
            anchors[mine],
            sampling.of(mine),
            positions[mine],
            sampled=sampling.sampled,
        )
        packed = _pack(chain, draft.confidence(own, chain))
        told = deal.in_batch_order(self.ranks.all_gather(packed))
        return _unpack(told, gamma, self._spread(chain.logits))

    def draft_replicated(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        sampling: Sampling,
    ) -> Drafted:
        """The Markov loop for all requests on every rank; arguments as for `draft_sharded`."""
        assert self._draft is not None
        draft, (num_reqs, gamma) = self._draft, hidden.shape[:2]
        base = gather_vocab(draft.base_logits(hidden.flatten(0, 1)), draft.num_logits, self.ranks)
        chain = draft.chain(
            base.view(num_reqs, gamma, -1),
            hidden,
            anchors,
            sampling.params,
            positions,
            sampled=sampling.sampled,
        )
        confidence, logits = draft.confidence(hidden, chain), chain.logits
        if self.ranks.size == 1:
            return Drafted(Drafts(chain.token_ids, self._spread(logits)), confidence)
        if logits is not None:
            logits = logits[self.deal(num_reqs).mine]
        # near ties may go either way on different ranks: what rank 0 drafted counts
        told = self.ranks.broadcast(_pack(chain, confidence))
        return _unpack(told, gamma, self._spread(logits))

    def _exchange(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N * T', H] in owner-major order to whole logits rows [T', V] at their owners."""
        part = self._target.logits(hidden)
        return exchange_vocab(part, self._target.spec.vocab_size, self.ranks)

    def _spread(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        """Draft logits over the target's vocabulary."""
        if logits is None or self._draft is None:
            return None
        return scatter_logits(logits, self._draft.draft_to_target, self._target.spec.vocab_size)


def _pack(chain: Chain, confidence: torch.Tensor | None) -> torch.Tensor:
    """[R, G] or [R, 2G] int32: tokens, and confidences bit by bit."""
    ids = chain.token_ids.int()
    return ids if confidence is None else torch.cat((ids, confidence.view(torch.int32)), dim=1)


def _unpack(told: torch.Tensor, gamma: int, logits: torch.Tensor | None) -> Drafted:
    ids, bits = told[:, :gamma].long(), told[:, gamma:]
    confidence = bits.contiguous().view(torch.float32) if bits.shape[1] else None
    return Drafted(Drafts(ids.contiguous(), logits), confidence)
