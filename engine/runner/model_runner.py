"""One process's networks and caches: what a prefill and a round compute."""

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.kernels.acceptance import Acceptance, Drafts, accept
from engine.kernels.markov import scatter_logits
from engine.kernels.sampling import SamplingRows, sample
from engine.kernels.step_inputs import step_inputs
from engine.kv.cache import PagedKV
from engine.models.decoder import Decoder
from engine.models.drafter import Drafter
from engine.runner.batch import attention_batch, slots_of
from engine.runner.rows import Rows
from engine.scheduler import Chunk
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Networks:
    """Target and draft with their caches; one block table addresses both."""

    target: Decoder
    target_kv: PagedKV
    draft: Drafter | None = None
    draft_kv: PagedKV | None = None
    num_speculative_tokens: int = 0


class Forward(NamedTuple):
    """What a target forward leaves for the rest of the step. T tokens."""

    hidden: torch.Tensor  # [T, H], final-normed
    taps: torch.Tensor | None  # [T, A*H]
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64


class ModelRunner:
    """Executes steps. Holds no policy: who runs and for how long is decided by its caller."""

    def __init__(self, networks: Networks, rows: Rows, seconds: dict[str, float]) -> None:
        """Take over networks, rows and the wall-time counters to add to."""
        self.net = networks
        self.rows = rows
        self.seconds = seconds
        self.speculating = networks.draft is not None
        """False: decode plainly, and make no draft context."""

        self.first_logits = torch.empty(0)
        """[requests, V] target logits behind the first tokens of the last prefill that had any."""

        self.last_confidence: torch.Tensor | None = None
        """[R, G] float32 confidence logits of the last draft; None without a head."""

    def start(self, sequence: Sequence) -> None:
        """Bind an admitted sequence to its row."""
        request = sequence.request
        self.rows.start(sequence.row, request.params, request.noise_key)

    def prefill(self, chunks: Items[Chunk]) -> list[list[int] | None]:
        """Compute prompt chunks in target and draft caches.

        Returns:
            Per chunk, where it ends a fresh prompt the first output token (nothing if the logits
            are not finite), else None.
        """
        with self._timed("prefill"):
            return self._prefill(chunks)

    def plain(self, sequences: Items[Sequence]) -> list[list[int]]:
        """One round without drafts: each sequence gets one token."""
        return self._round(sequences, [1] * len(sequences), None)

    def speculate(self, sequences: Items[Sequence], verify_lens: Items[int]) -> list[list[int]]:
        """One draft-verify-accept round.

        Args:
            sequences: R decoding sequences in batch order.
            verify_lens: Target queries per sequence, anchor included, in [1, G+1].

        Returns:
            Per sequence, the committed tokens, in [1, verify_len]; none if a logit that decides
            is not finite.
        """
        with self._timed("draft"):
            drafts = self._draft(sequences)
        return self._round(sequences, verify_lens, drafts)

    def _prefill(self, chunks: Items[Chunk]) -> list[list[int] | None]:
        device = self.rows.device
        sequences = [c.sequence for c in chunks]
        table = self._tables(sequences)
        ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        ends = torch.tensor([c.count for c in chunks]).cumsum(0)
        cu = torch.nn.functional.pad(ends, (1, 0)).to(device, torch.int32)
        forward = self._forward(
            sequences,
            table,
            cu,
            [c.count for c in chunks],
            [c.start + c.count for c in chunks],
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
        )
        self._store_context(forward, forward.slots)
        picked = [i for i, c in enumerate(chunks) if c.samples]
        out: list[list[int] | None] = [None] * len(chunks)
        if picked:
            last = (ends[picked] - 1).to(device)
            logits = self.first_logits = self.net.target.logits(forward.hidden[last])
            rows = self._row_index([chunks[i].sequence for i in picked])
            at = torch.tensor([chunks[i].sequence.num_prompt for i in picked], device=device)
            tokens = sample(logits, self.rows.params.select(rows), at).tolist()
            finite = logits.amax(dim=-1).isfinite().tolist()
            for i, token, ok in zip(picked, tokens, finite, strict=True):
                out[i] = [token] if ok else []
        return out

    def _draft(self, sequences: Items[Sequence]) -> Drafts:
        draft, kv = self.net.draft, self.net.draft_kv
        assert draft is not None
        assert kv is not None
        gamma, device = self.net.num_speculative_tokens, self.rows.device
        first = 0 if draft.spec.sample_from_anchor else 1
        num_rows, num_reqs = gamma + first, len(sequences)
        anchors, starts, params = self._place(sequences)
        masks = torch.full((num_reqs, num_rows - 1), draft.spec.mask_token_id, device=device)
        lens = torch.full((num_reqs,), num_rows, dtype=torch.int32, device=device)
        inputs = step_inputs(anchors, masks, starts, lens, num_reqs * num_rows)
        batch = attention_batch(
            sequences,
            self._tables(sequences),
            inputs.cu_seqlens_q,
            [num_rows] * num_reqs,
            [s.num_computed + num_rows for s in sequences],
            kv.kv_block_size,
        )
        slots = slots_of(batch, inputs.positions)
        hidden = draft.forward(inputs.token_ids, inputs.positions, slots, batch, kv)
        hidden = hidden.view(num_reqs, num_rows, -1)[:, first:]
        sampled = any(s.request.params.temperature > 0 for s in sequences)
        chain = draft.chain(hidden, anchors, params, starts, sampled=sampled)
        self.last_confidence = draft.confidence(hidden, chain)
        logits = chain.logits
        if logits is not None:
            vocab = self.net.target.spec.vocab_size
            logits = scatter_logits(logits, draft.draft_to_target, vocab)
        return Drafts(chain.token_ids, logits)

    def _round(
        self, sequences: Items[Sequence], verify_lens: Items[int], drafts: Drafts | None
    ) -> list[list[int]]:
        with self._timed("verify"):
            device = self.rows.device
            anchors, starts, params = self._place(sequences)
            if drafts is None:
                drafts = Drafts(anchors.new_empty((len(sequences), 0)), self._no_logits(sequences))
            lens = torch.tensor(verify_lens, dtype=torch.int32, device=device)
            inputs = step_inputs(anchors, drafts.token_ids, starts, lens, sum(verify_lens))
            forward = self._forward(
                sequences,
                self._tables(sequences),
                inputs.cu_seqlens_q,
                verify_lens,
                [s.num_computed + n for s, n in zip(sequences, verify_lens, strict=True)],
                inputs.token_ids,
                inputs.positions,
            )
            logits = self.net.target.logits(forward.hidden)
            accepted = accept(logits, inputs.cu_seqlens_q, drafts, params, starts)
            self._store_context(forward, _kept_slots(forward.slots, accepted, lens))
            counts = torch.where(_all_finite(logits, lens), accepted.num_committed, 0).tolist()
            return [ids[:n] for ids, n in zip(accepted.token_ids.tolist(), counts, strict=True)]

    def _no_logits(self, sequences: Items[Sequence]) -> torch.Tensor:
        vocab = self.net.target.spec.vocab_size
        return torch.empty((len(sequences), 0, vocab), device=self.rows.device)

    def _forward(
        self,
        sequences: Items[Sequence],
        table: torch.Tensor,
        cu: torch.Tensor,
        query_lens: Items[int],
        kv_lens: Items[int],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> Forward:
        """Target forward; stores K and V of every token."""
        kv = self.net.target_kv
        batch = attention_batch(sequences, table, cu, query_lens, kv_lens, kv.kv_block_size)
        slots = slots_of(batch, positions)
        draft = self.net.draft
        wanted = draft.spec.taps if draft is not None and self.speculating else ()
        hidden, taps = self.net.target.forward(token_ids, positions, slots, batch, kv, wanted)
        return Forward(hidden, taps, positions, slots)

    def _store_context(self, forward: Forward, slots: torch.Tensor) -> None:
        """Taps of the tokens with a slot >= 0 become draft context."""
        draft, kv = self.net.draft, self.net.draft_kv
        if draft is not None and kv is not None and forward.taps is not None:
            draft.store_context(forward.taps, forward.positions, slots, kv)

    def _place(self, sequences: Items[Sequence]) -> tuple[torch.Tensor, torch.Tensor, SamplingRows]:
        """Anchors [R], their positions [R] and sampling parameters, gathered from the rows."""
        for s in sequences:
            self.rows.set_state(s.row, s.num_computed, s.token_ids[-1])
        index = self._row_index(sequences)
        return (
            self.rows.anchor[index],
            self.rows.num_computed[index],
            self.rows.params.select(index),
        )

    def _tables(self, sequences: Items[Sequence]) -> torch.Tensor:
        for s in sequences:
            self.rows.set_blocks(s.row, s.block_ids)
        return self.rows.block_table[self._row_index(sequences)]

    def _row_index(self, sequences: Items[Sequence]) -> torch.Tensor:
        return torch.tensor([s.row for s in sequences], device=self.rows.device)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin


def _kept_slots(slots: torch.Tensor, acceptance: Acceptance, lens: torch.Tensor) -> torch.Tensor:
    """[T] slots of committed inputs, -1 for rejected drafts: their hidden states mean nothing."""
    offset = torch.arange(len(slots), device=slots.device)
    begin = lens.cumsum(0) - lens
    offset = offset - begin.repeat_interleave(lens, output_size=len(slots))
    limit = acceptance.num_committed.repeat_interleave(lens, output_size=len(slots))
    return torch.where(offset < limit, slots, -1)


def _all_finite(logits: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """[R] bool: is the largest logit of every row of a request a number?"""
    bad = (~logits.amax(dim=-1).isfinite()).long()
    begin = lens.cumsum(0) - lens
    total = torch.nn.functional.pad(bad.cumsum(0), (1, 0))
    return total[begin + lens] == total[begin]
