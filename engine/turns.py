"""A turn of the loop: admit, prefill, draft, verify, commit.

On a CUDA device results are taken in a turn late: the host prepares a round while the one before it
runs. Where launches wait for their work, they are taken in at once.
"""

import time

import numpy as np

from engine.commits import Commits
from engine.dist.group import Group
from engine.errors import CapacityError
from engine.outcomes import Output
from engine.planning import Decisions
from engine.recovery import Shortage, Shrinking
from engine.runner.model_runner import ModelRunner
from engine.runner.out_of_memory import first_line, is_out_of_memory
from engine.runner.pending import Launched, RoundResult
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence
from engine.spec.plan import Decided
from engine.telemetry import EngineStats

_PAUSE_S = 0.05
"""What a caller does between two turns is part of them, up to so much."""


class Turns:
    """What runs, and what is on its way.

    Args:
        scheduler: Says who is next.
        runner: Launches steps.
        decisions: Say what rounds do.
        commits: Take in what steps brought.
        stats: Counts.
        group: The ranks that take turns together.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        decisions: Decisions,
        commits: Commits,
        stats: EngineStats,
        group: Group,
    ) -> None:
        """Nothing runs yet."""
        self._scheduler, self._runner, self._decisions = scheduler, runner, decisions
        self._commits, self._stats, self._group = commits, stats, group
        self._gamma = runner.net.num_speculative_tokens
        self.shrinking = Shrinking(scheduler, stats)
        self.launched: list[Launched] = []
        """Steps whose results the host has not taken in."""

        self._decided: Decided | None = None
        """The round of a turn."""

        self._alone = False
        """Was there no prefill beside it?"""

        self._left = 0.0
        """Clock time at the end of the turn before; 0: there is none that counts."""

        self._slots = 0
        """Requests that the last round had room for."""

    def check(self) -> None:
        """Can there be another turn?

        Raises:
            CapacityError: The step before this one did not fit, and no smaller one can be made.
        """
        if self.shrinking.failure is not None:
            raise self.shrinking.failure

    def abandon(self) -> None:
        """Drop every unfinished request."""
        self.launched, self._left = [], 0.0
        self._scheduler.drop_all()
        self._decisions.finish()
        self.shrinking.reset()
        self.count()

    def turn(self) -> list[Output]:
        """Launch a prefill and a round, then take in results; what has ended."""
        begin, occupied = time.perf_counter(), self._runner.clock.occupied()
        before, self.launched = self.launched, []
        # what the caller did meanwhile kept this thread from the next round, too
        outside = min(begin - self._left, _PAUSE_S) if self._left else 0.0
        seconds, tokens = self._stats.seconds, self._stats.output_tokens
        prefilled = seconds.get("prefill", 0.0)
        self._decided, self._alone = None, False
        finished: list[Output] = []
        shortage = self._launch(begin, finished)
        finished += self.take(before)
        if shortage is not None:
            finished += self.take(self.launched)
            self.launched = []
            self.shrinking.after(shortage, self._runner.release)
        self._runner.clock.settle()
        self.count()
        idle = not self._scheduler.num_unfinished
        if idle:
            self._decisions.finish()
        now = time.perf_counter()
        self._left = 0.0 if idle else now  # whoever has nothing to do waits for more
        host = now - begin - (self._runner.clock.occupied() - occupied)
        seconds["host"] = seconds.get("host", 0.0) + host
        self._decisions.note_turn(
            self._decided,
            host + outside,
            seconds.get("prefill", 0.0) - prefilled,
            self._stats.output_tokens - tokens,
            alone=self._alone and all(x.decided for x in before),
        )
        return finished

    def _launch(self, now: float, finished: list[Output]) -> Shortage | None:
        """Launch a prefill and a round.

        Args:
            now: Clock time.
            finished: Gets what ends at once, where launches wait for their work.

        Returns:
            What ran out of memory. What was launched before it is good.
        """
        kind, members = "", []
        try:
            if chunks := self._scheduler.prefill():
                kind, members = "prefill", [c.sequence for c in chunks]
                self._prefill(chunks, now)
                finished += self._take_if_done()
                self.shrinking.fits(kind)
            if batch := self._scheduler.decoding():
                self._alone = not kind
                kind, members = "round", batch
                self._decided = self._round(batch)
                finished += self._take_if_done()
                self.shrinking.fits(kind)
        except RuntimeError as error:
            if not kind or not is_out_of_memory(error):
                raise
            if self._group.size > 1:  # the others cannot know, and are in the middle of it
                raise CapacityError(
                    f"a {kind} of {len(members)} requests does not fit into memory: "
                    f"{first_line(error)}",
                    hint="use a smaller --max-num-seqs, --max-num-batched-tokens or "
                    "--gpu-memory-utilization; finished rows are kept",
                ) from error
            # the error itself holds the step's tensors, by its frames: it must not stay
            ids = [s.request.request_id for s in members]
            return Shortage(kind, ids, first_line(error), self._slots if kind == "round" else 0)
        return None

    def _prefill(self, chunks: list[Chunk], now: float) -> None:
        """Launch prompt chunks; who ends its prompt may join a round of the same turn."""
        if admitted := [c.sequence for c in chunks if c.admitted]:
            self._runner.start(admitted)
            for sequence in admitted:
                sequence.admitted = sequence.admitted or now
        pending = self._runner.prefill(chunks)
        fresh = [(c.sequence, c.sequence.epoch) for c in chunks if c.samples]
        for chunk in chunks:
            self._scheduler.advance(chunk.sequence, chunk.start + chunk.count)
        self.launched.append(Launched(fresh, pending))

    def _round(self, batch: list[Sequence]) -> Decided:
        """Decide and launch a round."""
        begin = time.perf_counter()
        decided = self._decisions.decide(batch, self._scheduler.soon)
        self._slots = decided.plan.requests
        drafts = self._runner.draft(batch, decided.plan)
        decided = self._decisions.revise(decided, drafts)
        pending = self._runner.verify(batch, decided.plan, drafts)
        self._decisions.count(decided)
        members = [(s, s.epoch) for s in batch]
        self.launched.append(Launched(members, pending, decided, begin, time.perf_counter()))
        return decided

    def _take_if_done(self) -> list[Output]:
        if self._runner.overlapped:
            return []
        launched, self.launched = self.launched, []
        return self.take(launched)

    def take(self, launched: list[Launched]) -> list[Output]:
        """Commit the results of earlier launches; void ones are skipped."""
        finished: list[Output] = []
        for launch in launched:
            with self._runner.clock.waiting(), self._group.waiting():
                values = launch.pending.wait()
            now, result = time.perf_counter(), None
            going = [not s.ended and s.epoch == epoch for s, epoch in launch.members]
            ids, lens = values[:, 1:], [0] * len(values)
            if launch.decided is not None:
                plain = launch.decided.plan.path == "plain"
                result = RoundResult.unpack(values, 1 if plain else self._gamma + 1)
                ids, lens = result.token_ids, result.verify_lens.tolist()
            counts, ids = values[:, 0].tolist(), ids.tolist()
            many = zip(launch.members, going, counts, ids, lens, strict=True)
            finished += self._commits.take(
                ((s, tokens[:n], m) for (s, _), alive, n, tokens, m in many if alive), now
            )
            if result is not None:
                self._decisions.learn(launch, result, np.array(going, dtype=bool), now)
        return finished

    def count(self) -> None:
        """Bring the statistics of what runs up to date."""
        scheduler, stats = self._scheduler, self._stats
        stats.running = len(scheduler.running)
        stats.waiting = len(scheduler.waiting)
        stats.preemptions = scheduler.num_preemptions
        stats.kv_blocks_used = stats.kv_blocks_total - scheduler.num_free_blocks
