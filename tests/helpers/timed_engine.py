"""An engine without a model whose steps cost what a test says, on a clock of its own.

It batches as the real one does: admits while there is room, one step for all, rounds of drafts.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.config import EngineConfig
from engine.request import Completion, FinishReason, Request, RequestFailure, Round, Timing
from engine.telemetry import EngineStats
from tests.cli.fake import EOS, FakeTokenizer

Costs = Callable[[str, int], float]


class TimedTokenizer(FakeTokenizer):
    def is_silent(self, token_id: int) -> bool:
        return token_id >= 256


@dataclass
class _Running:
    request: Request
    answer: list[int]
    admitted: float
    given: int = 0
    commits: list[tuple[float, int]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True)
class _Limits:
    max_num_seqs: int
    max_num_batched_tokens: int = 512


def default_costs(phase: str, running: int) -> float:
    """Plain steps cost the same at any width, verification grows: drafting stops paying."""
    return {
        "prefill": 0.004,
        "draft": 0.001,
        "verify": 0.002 + 0.0015 * running,
        "plain": 0.004,
        "host": 0.0005,
    }[phase]


class TimedEngine:
    """Answers with letters; drafted rounds keep `accept` of `gamma` drafts."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        on_progress: Any = None,
        *,
        costs: Costs = default_costs,
        real_time: bool = False,
        gamma: int = 4,
        accept: int = 2,
    ) -> None:
        self.config = config or EngineConfig(model="m", draft="d", device="cpu")
        self.costs = costs
        self.real_time = real_time
        self.gamma, self.accept = gamma, accept
        self.now = 100.0
        self.tokenizer = TimedTokenizer()
        self.stats = EngineStats(drafted_at=[0] * gamma, accepted_at=[0] * gamma)
        self.limits = _Limits(self.config.max_num_seqs or 8)
        self.max_model_len = 4096
        self.seen: list[tuple[str, bool, int]] = []
        """(request id, drafted, width) of every request run."""

    def clock(self) -> float:
        return time.perf_counter() if self.real_time else self.now

    def validate(self, request: Request) -> None:
        pass

    def follow(self, on_round: Any) -> None:
        pass

    def prepare(self, max_num_seqs: int | None = None) -> float | None:
        return None

    def answer(self, request: Request) -> list[int]:
        """3 to 14 letters by the prompt, then EOS; cut at max_tokens."""
        size = 3 + sum(request.prompt_token_ids) % 12
        ids = [97 + (size + k) % 26 for k in range(size)] + [EOS]
        return ids[: request.params.max_tokens]

    def run(
        self,
        requests: Iterable[Request | None],
        *,
        speculate: bool = True,
        max_num_seqs: int | None = None,
    ) -> Iterator[Completion | RequestFailure]:
        source, running, more = iter(requests), [], True
        width = max_num_seqs or self.limits.max_num_seqs
        while True:
            new: list[_Running] = []
            while more and len(running) + len(new) < width:
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    assert running or new, "the source waits for results, but nothing runs"
                    break
                if b"FAIL" in bytes(t for t in request.prompt_token_ids if t < 256):
                    yield RequestFailure(
                        request=request, kind="too_long", message="as asked", retryable=False
                    )
                else:
                    self.seen.append((request.request_id, speculate, width))
                    self.stats.prompt_tokens += len(request.prompt_token_ids)
                    new.append(_Running(request, self.answer(request), 0.0))
            if not new and not running:
                return
            running = [*running, *new]
            ended = self._step(running, new, speculate)
            running = [r for r in running if r not in ended]
            yield from map(self._complete, ended)

    def _step(
        self, running: list[_Running], new: list[_Running], speculate: bool
    ) -> list[_Running]:
        for r in new:
            r.admitted = self.clock()
        if new:
            self._spend("prefill", len(new))
            for r in new:
                self._commit(r, 1)
        decoding = [r for r in running if r.given < len(r.answer)]
        if decoding and speculate:
            self._spend("draft", len(decoding))
        if decoding:
            self._spend("verify" if speculate else "plain", len(decoding))
        for r in decoding:
            self._round(r, speculate)
        self._spend("host", len(running))
        return [r for r in running if r.given == len(r.answer)]

    def _round(self, r: _Running, speculate: bool) -> None:
        left = len(r.answer) - r.given
        drafted = min(self.gamma, r.request.params.max_tokens - r.given - 1) if speculate else 0
        if not drafted:
            self._commit(r, 1)
            return
        committed = min(self.accept, drafted) + 1
        kept = min(committed, left)
        accepted = min(committed - 1, kept)
        if kept < committed:
            drafted = kept
        r.rounds.append(Round(drafted, accepted, kept))
        self.stats.rounds += 1
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        self.stats.committed += kept
        self._commit(r, kept)

    def _commit(self, r: _Running, count: int) -> None:
        r.given += count
        r.commits.append((self.clock(), count))
        self.stats.output_tokens += count

    def _spend(self, phase: str, running: int) -> None:
        if self.real_time:
            return  # the little that passes is not of a phase
        seconds = self.costs(phase, running)
        self.now += seconds
        name = "verify" if phase == "plain" else phase
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + seconds

    def _complete(self, r: _Running) -> Completion:
        ended = r.answer[-1] == EOS
        return Completion(
            request=r.request,
            token_ids=tuple(r.answer),
            text=self.tokenizer.decode(r.answer),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            stop_reason=EOS if ended else None,
            num_cached_tokens=0,
            rounds=tuple(r.rounds),
            timing=Timing(r.admitted, tuple(r.commits)),
        )
