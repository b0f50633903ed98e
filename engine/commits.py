"""Results taken in: tokens to their sequences, rounds to the totals, ends to whoever asked."""

from collections.abc import Iterable
from functools import cache

from engine.outcomes import Output, complete, not_finite
from engine.request import Round
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.telemetry import EngineStats
from engine.text import Tokenizer

Result = tuple[Sequence, list[int], int]
"""Whose, its tokens (none if it failed), and its target tokens in a round; 0 in a prefill."""


class Commits:
    """What a step brought, appended and counted.

    Args:
        scheduler: Learns how far sequences are, and which have ended.
        stats: Counts.
        tokenizer: Makes the text of finished sequences.
        eos_token_ids: End tokens of the model.
        max_model_len: Prompt and output tokens of one request.
        began: Clock time at which the engine began.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stats: EngineStats,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        began: float,
    ) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._max_model_len = max_model_len
        self._began = began

    def take(self, results: Iterable[Result], now: float) -> list[Output]:
        """Take in a step.

        Args:
            results: Of its sequences that still run.
            now: Clock time at which they were there.

        Returns:
            What has ended.
        """
        finished: list[Output] = []
        rounds: list[tuple[int, int, int]] = []
        output_tokens, scheduler, shared = 0, self._scheduler, self._scheduler.shared_block
        for sequence, tokens, verify_len in results:
            if not tokens:
                self._retire(sequence)
                finished.append(not_finite(sequence))
                continue
            kept, end = sequence.commit(tokens, self._eos, self._max_model_len)
            sequence.commits.append((now, kept))
            output_tokens += kept
            if verify_len:
                if verify_len > 1:
                    found, counted = _round(len(tokens), kept, verify_len - 1)
                    sequence.rounds.append(found)
                    rounds.append(counted)
                # the last kept token is the next anchor: its KV is not there yet
                done = sequence.num_computed + kept
                if shared and done // shared != sequence.num_published:
                    scheduler.advance(sequence, done)
                else:  # nothing but this, for each request of each round
                    sequence.num_computed = done
            if end is not None:
                self._retire(sequence)
                self._stats.cached_tokens += sequence.num_cached_tokens or 0
                finished.append(complete(sequence, end, self._tokenizer))
        if output_tokens and not self._stats.until_first_token:
            self._note_first_token(now)
        self._stats.output_tokens += output_tokens
        self._stats.count_rounds(rounds)
        return finished

    def _note_first_token(self, now: float) -> None:
        seconds = self._stats.seconds
        spent = {name: seconds.get(name, 0.0) for name in ("load", "warm-up", "capture")}
        rest = now - self._began - sum(spent.values())
        self._stats.until_first_token = {**spent, "rest": rest}

    def _retire(self, sequence: Sequence) -> None:
        sequence.ended = True
        self._scheduler.retire(sequence)


@cache
def _round(committed: int, kept: int, checked: int) -> tuple[Round, tuple[int, int, int]]:
    """A round that checked drafts, after the cut: there are few kinds, and many of each.

    Returns:
        For its request, and to be counted.
    """
    # a sequence that ended inside the drafts never output what follows
    drafted = kept if kept < committed else checked
    found = Round(drafted, min(committed - 1, kept), kept)
    return found, (found.drafted, found.accepted, kept)
