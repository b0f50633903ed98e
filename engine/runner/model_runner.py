"""Launches steps: host lists in, results on their way back. Holds no policy."""

from collections.abc import Sequence as Items
from collections.abc import Set

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.acceptance import Drafts
from engine.runner.batch import Members, Needs
from engine.runner.clock import Clock
from engine.runner.graphs import Graphs
from engine.runner.out_of_memory import release_caches
from engine.runner.pending import Downloads, Pending
from engine.runner.prefills import PrefillGraph
from engine.runner.rows import Rows
from engine.runner.steps import Networks, Prompt, Steps, query_bound
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.spec.plan import Path, Plan


class ModelRunner:
    """One process's networks, caches and rows. Who runs, and for how long, its caller decides."""

    def __init__(
        self,
        networks: Networks,
        rows: Rows,
        seconds: dict[str, float],
        *,
        use_graphs: bool,
        overlapped: bool | None = None,
        graph_pool_bytes: int = 0,
    ) -> None:
        """Take over networks, rows and the times to add to; graphs need a CUDA device."""
        self.net = networks
        self.rows = rows
        self.steps = Steps(networks, rows)
        self.clock = Clock(seconds, rows.device)
        self._downloads = Downloads()
        on_cuda = rows.device.type == "cuda"
        self.overlapped = on_cuda if overlapped is None else overlapped
        """Are results of a step taken in while the next one runs?"""

        self.graphs = Graphs(self.steps, rows.spare, graph_pool_bytes) if use_graphs else None
        self._last_needs: tuple[Items[Sequence], Needs] = ((), Needs(False, False, False))
        self._new_blocks = list[int]()
        """What the round's first graph writes, as `Rows.new_blocks`."""

        self.first_logits = torch.empty(0)
        """[1, V] target logits behind the first token of the last prefill that had one: of this
        rank's first request, on rank 0 the first of all. A copy: what captured steps leave lies in
        memory that they share."""

    def start(self, sequences: Items[Sequence]) -> None:
        """Bind admitted sequences to their rows."""
        requests = [s.request for s in sequences]
        self.rows.start(
            [s.row for s in sequences],
            [r.params for r in requests],
            [r.noise_key for r in requests],
        )

    def set_blocks(self, sequences: Items[Sequence]) -> None:
        """Copy to the rows which blocks the sequences have got since the last step."""
        self.rows.set_blocks([s.row for s in sequences], [s.block_ids for s in sequences])

    def prefill(self, chunks: Items[Chunk]) -> Pending:
        """Compute prompt chunks; those that end their prompt are placed before their first round.

        Returns:
            Per chunk that ends a fresh prompt, in order: 1 and the first output token, or 0 and
            anything where the logits are not finite.
        """
        sequences = [c.sequence for c in chunks]
        self.set_blocks(sequences)
        if self.graphs is not None:
            # of the prompts that end here, in their order: what they bring comes first
            first = sorted(chunks, key=lambda c: not c.samples)
            needs = self._needs([c.sequence for c in chunks if c.samples])
            with self.clock.capturing():
                captured = self.graphs.prefills.find(first, needs)
            if captured is not None:
                with self.clock.phase("prefill"):
                    return self._replay(captured, first)
        with self.clock.phase("prefill"):
            members = self._members(sequences)
            hidden = self.steps.prefill(members, self._prompt(chunks))
            return Pending(self._place(chunks, hidden), self._downloads)

    def _replay(self, captured: PrefillGraph, chunks: Items[Chunk]) -> Pending:
        """`prefill` from a graph; chunks that end fresh prompts come first."""
        assert self.graphs is not None
        self.graphs.prefills.load(captured, chunks)
        captured.graph.replay()
        self.first_logits = captured.logits.clone()
        self._place_resumed(chunks)
        return Pending(captured.result, self._downloads, sum(c.samples for c in chunks))

    def captured(self, sequences: Items[Sequence]) -> Set[tuple[Path, int, int]]:
        """Rounds of these sequences that can be replayed: (path, requests, tokens)."""
        return set() if self.graphs is None else self.graphs.captured(self._needs(sequences))

    @property
    def capture_ms(self) -> float | None:
        """What capturing a round takes; None if that is not known."""
        return None if self.graphs is None else self.graphs.capture_ms

    def draft(self, sequences: Items[Sequence], plan: Plan) -> Drafts | None:
        """Launch the draft pass of a round; nothing for a plain one.

        Returns:
            The drafts [slots, G], padding included, where the pass leaves them.
        """
        if self.graphs is None:
            self.set_blocks(sequences)
            if plan.path == "plain":
                return None
            with self.clock.phase("draft"):
                return self._draft(self._members(sequences))
        if plan.path == "plain":
            return None
        with self.clock.capturing():
            captured = self.graphs.draft(plan, self._needs(sequences))
        self._load_first(sequences, plan)
        with self.clock.phase("draft"):
            captured.graph.replay()
        self.steps.last_confidence = captured.confidence
        return captured.drafts

    def verify(self, sequences: Items[Sequence], plan: Plan, drafts: Drafts | None) -> Pending:
        """Launch the rest of a round: verify, accept, move the rows on.

        Args:
            sequences: As given to `draft`.
            plan: What to verify; its slots as in `draft`.
            drafts: What `draft` returned.

        Returns:
            [sequences, 2 + W (+ G)] int64, for `RoundResult.unpack`.
        """
        if self.graphs is None:
            members, budget = self._members(sequences), None
            if plan.budget is not None:
                budget = self.rows.uploads.send_integers([plan.budget])
            with self.clock.phase("verify"):
                needs = self._needs(sequences)
                return Pending(
                    self.steps.verify(
                        members,
                        drafts,
                        sampled=needs.sampled,
                        filtered=needs.filtered,
                        budget=budget,
                        num_tokens=plan.tokens,
                    ),
                    self._downloads,
                )
        with self.clock.capturing():
            captured = self.graphs.verify(plan, self._needs(sequences))
        if plan.path == "plain":
            self._load_first(sequences, plan)
        else:
            self.graphs.load([s.row for s in sequences], plan, self._new_blocks)
        with self.clock.phase("verify"):
            captured.graph.replay()
        return Pending(captured.result, self._downloads, len(sequences))

    def _load_first(self, sequences: Items[Sequence], plan: Plan) -> None:
        """Tell a round's first graph whose it is, and what blocks they have got."""
        assert self.graphs is not None
        rows = [s.row for s in sequences]
        self._new_blocks = self.rows.new_blocks(rows, [s.block_ids for s in sequences])
        if len(self._new_blocks) > 3 * self.graphs.most_blocks:
            self.rows.send_blocks(self._new_blocks)
            self._new_blocks = []
        self.graphs.load(rows, plan, self._new_blocks)

    def round(self, sequences: Items[Sequence], plan: Plan) -> Pending:
        """A whole round whose plan does not wait for its drafts: `draft`, then `verify`."""
        return self.verify(sequences, plan, self.draft(sequences, plan))

    def survival(self, drafts: Drafts, count: int) -> NDArray[np.float64]:
        """[count, G] of a draft pass, once it is there: waits for the device."""
        assert drafts.survival is not None
        found: NDArray[np.float64] = (
            Pending(drafts.survival, self._downloads, count).wait().astype(np.float64)
        )
        return found

    def release(self) -> None:
        """Give back all memory that is not needed to go on: captured rounds, and what torch keeps.

        Results on their way must have been waited for.
        """
        release_caches(self.rows.device)  # also waits: a step that failed may have begun
        if self.graphs is not None:
            self.graphs.clear()
        self.steps.last_confidence = None
        self.first_logits = torch.empty(0)
        release_caches(self.rows.device)

    def _draft(self, members: Members) -> Drafts:
        return self.steps.draft(members, sampled=self._needs(members.sequences).sampled)

    def _members(self, sequences: Items[Sequence]) -> Members:
        return Members(
            self._index(sequences), sequences, self._most([1] * len(sequences), sequences)
        )

    def _most(self, counts: Items[int], sequences: Items[Sequence]) -> int:
        """The largest sum of counts over one rank's own sequences; 0 where ranks have none."""
        owners = self.net.num_owners
        if owners == 1:
            return 0
        sums = [0] * owners
        for sequence, count in zip(sequences, counts, strict=True):
            sums[sequence.row % owners] += count
        return max(sums)

    def _needs(self, sequences: Items[Sequence]) -> Needs:
        """What a step of these has to be able to do; asked several times a round."""
        known, needs = self._last_needs
        # who holds a request may change while the batch does not
        same = known == sequences if self.net.num_owners == 1 else known is sequences
        if not same or needs.speculating != self.steps.speculating:
            needs = self._find_needs(sequences)
            self._last_needs = sequences, needs
        return needs

    def _find_needs(self, sequences: Items[Sequence]) -> Needs:
        most, owners = self._most([1] * len(sequences), sequences), self.net.num_owners
        # where requests are spread evenly a round's slots say it; else few numbers, not all
        even = most <= -(-len(sequences) // owners)
        crowd = 0 if even else min(1 << (most - 1).bit_length(), -(-self.rows.spare // owners))
        return Needs(self.steps.speculating, **_sampling_needs(sequences), crowd=crowd)

    def _prompt(self, chunks: Items[Chunk]) -> Prompt:
        upload = self.rows.uploads.send
        ids = [t for c in chunks for t in c.sequence.token_ids[c.start : c.start + c.count]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.count)]
        ends = torch.tensor([0, *(c.count for c in chunks)]).cumsum(0)
        return Prompt(
            upload(torch.tensor(ids)),
            upload(torch.tensor(positions)),
            upload(ends.int()),
            upload(torch.tensor([c.start + c.count for c in chunks]).int()),
            query_bound(max(c.count for c in chunks)),
            self._most([c.count for c in chunks], [c.sequence for c in chunks]) or len(ids),
        )

    def _place(self, chunks: Items[Chunk], hidden: torch.Tensor) -> torch.Tensor:
        """First tokens [fresh prompts, 2], and the rows of all prompts that end here."""
        upload = self.rows.uploads.send
        self._place_resumed(chunks)
        ends = torch.tensor([c.count for c in chunks]).cumsum(0)
        fresh = [i for i, c in enumerate(chunks) if c.samples]
        if not fresh:
            return torch.empty((0, 2), dtype=torch.int64)
        last = upload(ends[fresh] - 1)
        starters = [chunks[i].sequence for i in fresh]
        index = self._index(starters)
        lengths = upload(torch.tensor([s.num_prompt for s in starters]))
        logits, result = self.steps.first_tokens(
            index, hidden[last], lengths, **_sampling_needs(starters)
        )
        self.first_logits = logits[:1].clone()
        self.rows.place(index, lengths, result[:, 1])
        return result

    def _place_resumed(self, chunks: Items[Chunk]) -> None:
        """Rows of prompts that end here and had begun to decode before."""
        resumed = [c.sequence for c in chunks if c.ends and not c.samples]
        if resumed:
            self.rows.place(
                self._index(resumed),
                self.rows.uploads.send_integers([s.prefill_end for s in resumed]),
                self.rows.uploads.send_integers([s.token_ids[-1] for s in resumed]),
            )

    def _index(self, sequences: Items[Sequence]) -> torch.Tensor:
        return self.rows.uploads.send_integers([s.row for s in sequences])


def _sampling_needs(sequences: Items[Sequence]) -> dict[str, bool]:
    """What sampling of a batch has to be able to do: `sampled` at all, and `filtered`."""
    hot = [s.request.params for s in sequences if s.request.params.temperature > 0]
    return {
        "sampled": bool(hot),
        "filtered": any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in hot),
    }
