"""What a prefill and a round compute, on the device: no host reads, so that rounds can be captured.

Everything is read from and written to the rows. Padding members point to the spare row and have no
tokens.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from engine.dist.collectives import Collectives, Solo
from engine.kernels.acceptance import Drafts
from engine.kernels.commit import commit
from engine.kernels.layout import Layout
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.slot_mapping import slot_mapping
from engine.kernels.step_inputs import step_inputs
from engine.kernels.verify_plan import VerifyLens, survival_of, verify_lens
from engine.models.interface import Draft, State, Target
from engine.runner.batch import Members, Seats, attention_batch, dealt, own_room
from engine.runner.owners import Owners, Sampling
from engine.runner.rows import Rows
from engine.runner.synthetic import synthesize, synthetic_survival


@dataclass(frozen=True, slots=True)
class Networks:
    """Target and draft with their caches; one block table addresses both."""

    target: Target
    target_kv: State
    draft: Draft | None = None
    draft_kv: State | None = None
    num_speculative_tokens: int = 0
    ranks: Collectives = field(default_factory=Solo)
    """What both are dealt to."""

    data_attention: bool = False
    """Does each rank hold the state of its own requests alone, and all of attention's weights?"""

    @property
    def num_owners(self) -> int:
        """Ranks that hold requests of their own; 1: all hold all of them."""
        return self.ranks.size if self.data_attention else 1


def query_bound(longest: int) -> int:
    """What to tell attention of a prefill's longest chunk: more than a tile in any case.

    Short chunks are rare, the rest of a prompt that a step had no room for. They would have tiles
    of their own, and the first of them would wait two seconds for its kernel to be compiled.
    """
    return max(longest, 256)


class Prompt(NamedTuple):
    """A ragged prefill. T tokens, R requests; all tensors on the device."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    cu_seqlens_q: torch.Tensor  # [R+1] int32
    seq_lens: torch.Tensor  # [R] int32, KV tokens after this chunk
    max_query_len: int  # a bound: see `query_bound`
    most_tokens: int
    """No rank's requests have more of them; T where ranks do not hold requests."""


class Steps:
    """The device side of one process."""

    def __init__(self, networks: Networks, rows: Rows) -> None:
        """Take over networks and rows."""
        self.net = networks
        self.rows = rows
        self.owners = Owners(networks.target, networks.draft, networks.ranks, rows.device)
        self._seats: Seats | None = None
        if networks.num_owners > 1:
            self._seats = Seats(networks.ranks.rank, networks.ranks.size, rows.spare)
        self.speculating = networks.draft is not None
        """False: decode plainly, and make no draft context."""

        self.synthetic_acceptance: float | None = None
        """Tokens a round commits on average whatever the target says: for benchmarks only."""

        gamma = networks.num_speculative_tokens
        self.temperatures = torch.ones(gamma, dtype=torch.float32, device=rows.device)
        self.shifts = torch.zeros_like(self.temperatures)
        """[G] both, what confidence logits go through by position: from calibration."""

        self.sharded_from: int | None = None
        """Batch size from which the Markov loop runs at the requests' owners; None: never."""

        self.last_confidence: torch.Tensor | None = None
        """[R, G] float32 confidence logits of the last draft; None without a head."""

    def prefill(self, members: Members, prompt: Prompt) -> torch.Tensor:
        """Compute prompt chunks in target and draft caches; returns final hidden states [T, H]."""
        batch = attention_batch(
            members,
            self.rows.block_table[members.index],
            prompt.cu_seqlens_q,
            prompt.seq_lens,
            prompt.max_query_len,
            self.net.target_kv.kv_block_size,
        )
        batch = self._deal(batch, members, len(prompt.token_ids), prompt.most_tokens)
        slots = self._slots(batch.block_table, prompt.positions, prompt.cu_seqlens_q)
        hidden, taps = self.net.target.forward(
            prompt.token_ids, prompt.positions, slots, batch, self.net.target_kv, self._taps()
        )
        self._store_context(taps, prompt.positions, slots, batch)
        return hidden

    def first_tokens(
        self,
        index: torch.Tensor,
        hidden: torch.Tensor,
        lengths: torch.Tensor,
        *,
        sampled: bool,
        filtered: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample what follows finished prompts.

        Args:
            index: [R] int64, rows.
            hidden: [R, H], final hidden states of the prompts' last tokens.
            lengths: [R] int64, prompt lengths.
            sampled: Is any temperature > 0?
            filtered: Has any of those top-k, top-p or min-p?

        Returns:
            Logits [c, V] of the requests this rank owns, in order; and [R, 2] int64: 1 and the
            token, or 0 where logits are not finite.
        """
        sampling = Sampling(self.rows.params(index), sampled, filtered)
        return self.owners.first_tokens(hidden, lengths, sampling)

    def draft(self, members: Members, *, sampled: bool) -> Drafts:
        """Draft G tokens a request.

        Args:
            members: R requests.
            sampled: Is any temperature > 0?
        """
        draft, kv = self.net.draft, self.net.draft_kv
        assert draft is not None
        assert kv is not None
        gamma, num_reqs = self.net.num_speculative_tokens, len(members.index)
        first = 0 if draft.spec.sample_from_anchor else 1
        width = gamma + first
        at, params = self.rows.layout(members.index, width)
        masks = torch.full(
            (num_reqs, width - 1), draft.spec.mask_token_id, device=members.index.device
        )
        inputs = step_inputs(at.anchors, masks, at.starts, at.lens, num_reqs * width)
        batch = attention_batch(
            members,
            at.block_table,
            inputs.cu_seqlens_q,
            at.seq_lens,
            width,
            kv.kv_block_size,
        )
        batch = self._deal(batch, members, num_reqs * width, members.most_owned * width)
        slots = self._slots(at.block_table, inputs.positions, inputs.cu_seqlens_q)
        hidden = draft.forward(inputs.token_ids, inputs.positions, slots, batch, kv)
        hidden = hidden.view(num_reqs, width, -1)[:, first:]
        sampling = Sampling(params, sampled, False)
        owners = self.owners
        loop = owners.draft_sharded if self.shards(num_reqs) else owners.draft_replicated
        drafted = loop(hidden, at.anchors, at.starts, sampling)
        confidence = self.last_confidence = drafted.confidence
        survival = None
        if confidence is not None:
            survival = survival_of(confidence, self.temperatures, self.shifts)
        if self.synthetic_acceptance is not None:
            survival = synthetic_survival(self.synthetic_acceptance, at.starts, gamma)
        return replace(drafted.drafts, survival=survival)

    def shards(self, num_reqs: int) -> bool:
        """Does the Markov loop of a batch of this size run at the requests' owners?"""
        return self.sharded_from is not None and num_reqs >= self.sharded_from

    def verify(
        self,
        members: Members,
        drafts: Drafts | None,
        *,
        sampled: bool,
        filtered: bool,
        budget: torch.Tensor | None = None,
        num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Check drafts, or decode one token without any, and move the rows on.

        Args:
            members: R requests.
            drafts: What was drafted; None decodes plainly.
            sampled: Is any temperature > 0?
            filtered: Has any of those top-k, top-p or min-p?
            budget: [1] int64, drafts to check in the whole batch; None checks all.
            num_tokens: T >= requests + budget; with a budget only.

        Returns:
            [R, 2 + W (+ G)] int64, for `RoundResult.unpack`.
        """
        num_reqs = len(members.index)
        if drafts is None:
            drafts = Drafts(members.index.new_empty((num_reqs, 0)), self._no_logits(num_reqs))
        width = drafts.token_ids.shape[1] + 1
        at, params = self.rows.layout(members.index, width)
        lens, seq_lens = at.lens, at.seq_lens
        if budget is None or num_tokens is None:
            num_tokens = num_reqs * width
        else:
            lens, seq_lens = self._verified(members, drafts, at, budget, num_tokens)
        inputs = step_inputs(at.anchors, drafts.token_ids, at.starts, lens, num_tokens)
        cu = inputs.cu_seqlens_q
        batch = attention_batch(
            members, at.block_table, cu, seq_lens, width, self.net.target_kv.kv_block_size
        )
        batch = self._deal(batch, members, num_tokens, self._room(members, num_tokens, width))
        slots = self._slots(at.block_table, inputs.positions, cu)
        hidden, taps = self.net.target.forward(
            inputs.token_ids, inputs.positions, slots, batch, self.net.target_kv, self._taps()
        )
        sampling = Sampling(params, sampled, filtered)
        accepted = self.owners.accept(hidden, cu, drafts, at.starts, sampling)
        if self.synthetic_acceptance is not None and width > 1:
            accepted = synthesize(
                accepted, drafts, lens, self.synthetic_acceptance, params.noise_key, at.starts
            )
        rows = self.rows
        done = commit(
            accepted,
            cu,
            slots,
            members.index,
            at,
            rows.anchor,
            rows.num_computed,
            drafts.survival,
        )
        self._store_context(taps, inputs.positions, done.slots, batch)
        return done.result

    def _taps(self) -> tuple[int, ...]:
        draft = self.net.draft
        return draft.spec.taps if draft is not None and self.speculating else ()

    def _deal(
        self, batch: AttentionBatch, members: Members, num_tokens: int, most_tokens: int
    ) -> AttentionBatch:
        """The step's requests at the ranks that hold them, if any does."""
        if self._seats is None:
            return batch
        return dealt(batch, members, self._seats, num_tokens, most_tokens)

    def _verified(
        self,
        members: Members,
        drafts: Drafts,
        at: Layout,
        budget: torch.Tensor,
        num_tokens: int,
    ) -> VerifyLens:
        """The best drafts: `budget` of them, as far as ranks have room for their requests' ones."""
        assert drafts.survival is not None
        best = verify_lens(drafts.survival, at.starts, at.lens > 0, budget)
        width = drafts.token_ids.shape[1] + 1
        room = self._room(members, num_tokens, width)
        if self._seats is None or room == members.most_owned * width:
            return best
        return self._seats.within(best, drafts.survival, at.starts, members.index, room)

    def _room(self, members: Members, num_tokens: int, width: int) -> int:
        """Tokens that a rank has room for; what no rank has more of, without a budget."""
        if self._seats is None:
            return num_tokens
        return own_room(len(members.index), num_tokens, width, members.most_owned)

    def _slots(
        self, block_table: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor
    ) -> torch.Tensor:
        return slot_mapping(block_table, positions, cu, self.net.target_kv.kv_block_size)

    def _store_context(
        self,
        taps: torch.Tensor | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Taps of the tokens with a slot >= 0 become draft context."""
        draft, kv = self.net.draft, self.net.draft_kv
        if draft is not None and kv is not None and taps is not None:
            draft.store_context(taps, positions, slots, kv, batch)

    def _no_logits(self, num_reqs: int) -> torch.Tensor:
        vocab = self.net.target.spec.vocab_size
        owned = -(-num_reqs // self.net.ranks.size)
        return torch.empty((owned, 0, vocab), device=self.rows.device)
