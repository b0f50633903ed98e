"""The loop. Read this file first, then turns.py, one turn of it."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import torch

from engine.checkpoints import ignore_progress
from engine.commits import Commits
from engine.config import EngineConfig, VerifyMode
from engine.dist.group import Group
from engine.errors import ConfigError, DSparkError, RequestError
from engine.lockstep import Lockstep, compare_limits, part
from engine.outcomes import Output, check_request
from engine.planning import Decisions
from engine.request import Request, RequestFailure, SamplingParams
from engine.runner.loop_choice import choose_loop
from engine.sequence import Sequence
from engine.sizing import Limits
from engine.spec.cost_table import CostTable
from engine.telemetry import EngineStats, RoundRecord
from engine.text import StopMatcher, Tokenizer
from engine.turns import Turns
from engine.worker import load, make_runner, make_scheduler

_STARTERS = 16
"""One in so many rows may stand empty until enough newcomers can start together."""


class Engine:
    """Runs requests to completion, alone or as rank 0 of several processes."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[str, int, int], None] | None = None,
        group: Group | None = None,
    ) -> None:
        """Load checkpoints and size KV memory; bring up the other ranks.

        Args:
            config: The settings.
            on_progress: Called with (phase, done, total): bytes of `load NAME` for each checkpoint,
                then steps of `warm-up`.
            group: The ranks to be one of, other than rank 0; see `follow`.

        Raises:
            DSparkError: The checkpoints or settings cannot be served.
        """
        begin = time.perf_counter()
        self.stats = EngineStats()
        self._on_progress = on_progress or ignore_progress
        loaded = load(config, self._on_progress, group)
        self._group = loaded.group
        self._ranks = Lockstep(loaded.group)
        early = weakref.finalize(self, loaded.group.close)
        found = {**loaded.at.settings, "kv_block_size": loaded.limits.kv_block_size}
        self.config = replace(config, **found)
        """The settings, with `auto` replaced by what was chosen."""
        self.tokenizer: Tokenizer = loaded.tokenizer
        self.limits = limits = loaded.limits
        self.max_model_len = loaded.limits.max_model_len
        self.vocab_size = loaded.networks.target.spec.vocab_size
        self.gamma = loaded.networks.num_speculative_tokens
        """Draft tokens a round; 0 without a draft."""

        self._scheduler = make_scheduler(config, loaded)
        self.runner = make_runner(config, loaded, self.stats.seconds)
        early.detach()
        self._close = weakref.finalize(self, part, loaded.group, self.runner)
        steps, most = self.runner.steps, limits.max_num_seqs
        with loaded.group.step():
            compare_limits(loaded.group, limits, self.gamma)
            steps.sharded_from = choose_loop(steps, loaded.group, config.sharded_loop, most)
            self.decisions = Decisions(
                config,
                self.runner,
                self._scheduler.pools,
                {**loaded.fingerprint, "graphs": str(self.runner.graphs is not None)},
                self.stats.schedule,
                limits.max_model_len,
                loaded.group,
            )
        self.commits = Commits(
            self._scheduler,
            self.stats,
            self.tokenizer,
            loaded.eos_token_ids,
            self.max_model_len,
            begin,
        )
        self._turns = Turns(
            self._scheduler, self.runner, self.decisions, self.commits, self.stats, loaded.group
        )
        self._begin_stats(limits, loaded.warm_up_seconds, begin)

    def _begin_stats(self, limits: Limits, warm_up_seconds: float, begin: float) -> None:
        stats = self.stats
        stats.drafted_at = [0] * self.gamma
        stats.accepted_at = [0] * self.gamma
        stats.kv_blocks_total = limits.num_blocks * len(self._scheduler.pools)
        stats.kv_account = limits.kv_account
        if warm_up_seconds:
            stats.seconds["warm-up"] = warm_up_seconds
        stats.seconds["load"] = time.perf_counter() - begin - warm_up_seconds

    def validate(self, request: Request) -> None:
        """Raise RequestError if `request` cannot be served; touches no state."""
        trained = self.runner.net.target.spec.max_position
        by = "--max-model-len" if self.config.max_model_len is not None else "--kv-cache-memory"
        check_request(request, self.max_model_len, self.vocab_size, trained, by)

    def run(
        self,
        requests: Iterable[Request | None],
        *,
        speculate: bool = True,
        max_num_seqs: int | None = None,
        verify: VerifyMode | None = None,
    ) -> Iterator[Output]:
        """Yield each request as it finishes; pulls from `requests` only as rows free up.

        Closing the iterator early drops what is unfinished and leaves the engine usable.

        Args:
            requests: Consumed lazily; ids must differ. None means "nothing yet, ask again after the
                next step": for requests that are made from results, such as a conversation's next
                turn. Only the iterator's end ends the run.
            speculate: False decodes plainly although there is a draft, at no cost of it.
            max_num_seqs: Requests at once, for this run; at most the engine's own limit.
            verify: Which drafts are checked, for this run; None: as configured.

        Raises:
            ConfigError: `max_num_seqs` is out of range, or `verify` needs a confidence head.
            DSparkError: `requests` gave None while nothing ran, so that nothing could give more.
        """
        most = self.limits.max_num_seqs
        width = most if max_num_seqs is None else max_num_seqs
        if not 1 <= width <= most:
            raise ConfigError(
                f"max_num_seqs must be in [1, {most}], what the engine was made for, got {width}"
            )
        source, scheduler = iter(requests), self._scheduler
        self._turns.shrinking.allowed = True
        self._set_mode(speculate=speculate, verify=verify)
        # whoever prepared for fewer has fewer requests
        if max_num_seqs is not None or self.decisions.table is None:
            self.prepare(width)
        try:
            more = True
            while True:
                full = True
                while more and scheduler.num_unfinished < width:
                    try:
                        request = next(source)
                    except StopIteration:
                        more = False
                        break
                    if request is None:
                        full = False
                        break
                    if (failure := self._add(request)) is not None:
                        yield failure
                # who waits for more to come must be sure that they do
                self._start_together(width // _STARTERS if more and full else 0)
                if scheduler.num_unfinished == 0 and not self._turns.launched:
                    if not more:
                        return
                    raise DSparkError(
                        "the source of requests waits for results, but no request is running"
                    )
                yield from self.step()
        finally:
            self.abandon()

    def prepare(self, max_num_seqs: int | None = None) -> float | None:
        """Measure what rounds cost if that decides anything and is not known; nothing may run.

        `run` does it, too; here it can be done ahead, and for as many requests as there are.

        Args:
            max_num_seqs: Requests at once; None: the engine's own limit.

        Returns:
            Seconds it took; None if there was nothing to measure.
        """
        most = max_num_seqs or self.limits.max_num_seqs
        if not self.decisions.lack_costs(most):
            return None
        with self._ranks.together("prepare", most):
            return self.decisions.prepare(most, self._on_progress)

    def profile(
        self, sizes: Items[int], widths: Items[int] | None = None, repeats: int | None = None
    ) -> CostTable:
        """Measure a cost table for a file; nothing may run.

        Args:
            sizes: Batch sizes, rising.
            widths: Verify tokens per request; None: a few.
            repeats: Passes; None: a few.
        """
        given = list(sizes), None if widths is None else list(widths), repeats
        with self._ranks.together("profile", *given):
            return self.decisions.profile(self._on_progress, *given)

    def submit(
        self,
        requests: Iterable[Request],
        *,
        speculate: bool = True,
        verify: VerifyMode | None = None,
    ) -> None:
        """Queue requests for `step`, all at once; `run` is the way for anything but measuring.

        A step that runs out of memory is then an error: fewer requests would be measured than
        asked for.
        """
        self._turns.shrinking.allowed = False
        self._set_mode(speculate=speculate, verify=verify)
        if self.decisions.table is None:
            self.prepare()
        for request in requests:
            if (failure := self._add(request)) is not None:
                raise RequestError(failure.kind, failure.message)

    def close(self) -> None:
        """Send the other ranks away, if there are any; losing the engine does it, too."""
        self._close()

    def mirror(self) -> None:
        """Be another rank: do what rank 0 does, in step with it, until it closes its engine.

        Raises:
            RankError: Another rank failed.
        """
        done: dict[str, Callable[..., object]] = {
            "step": self.step,
            "add": lambda request: self._add(Request.from_json(request)),
            "together": self._start_together,
            "mode": lambda speculate, verify: self._set_mode(speculate=speculate, verify=verify),
            "prepare": self.prepare,
            "profile": self.profile,
            "abandon": self.abandon,
        }
        for name, *given in self._ranks.commands():
            done[name](*given)

    def abandon(self) -> None:
        """Drop every unfinished request; the engine is as new."""
        self._ranks.note("abandon")
        self._turns.abandon()

    def follow(self, on_round: Callable[[RoundRecord], None] | None) -> None:
        """Have every round told once its result is there; None: no more."""
        self.decisions.on_round = on_round

    @property
    def running(self) -> Items[Sequence]:
        """Requests with a row, oldest first."""
        return self._scheduler.running

    def top_logits(self, token_ids: Items[int], count: int = 2) -> list[tuple[int, float]]:
        """The target's most likely next tokens, for judging near ties; no request may be running.

        Args:
            token_ids: A whole prefix, 1 to max_model_len - 1 tokens.
            count: How many.

        Returns:
            (token id, logit), most likely first.
        """
        params = SamplingParams(max_tokens=1)
        request = Request(request_id="", prompt_token_ids=tuple(token_ids), params=params)
        for _ in self.run([request]):
            pass
        top = self.runner.first_logits[0].float().topk(count)
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One turn: launch a prefill and a round, then take in results.

        On a CUDA device the results are those of the turn before: the host prepares a round while
        the one before it runs. What a request gets past its end is dropped there. A step that does
        not fit into memory makes all requests wait, and the steps after it smaller; with several
        ranks it ends the run.

        Raises:
            CapacityError: The step before this one did not fit, and no smaller one can be made.
            RankError: Another rank failed.
        """
        self._turns.check()
        with self._ranks.together("step"):
            return self._turns.turn()

    def _start_together(self, count: int) -> None:
        if count != self._scheduler.together:
            self._ranks.note("together", count)
            self._scheduler.together = count

    def _set_mode(self, *, speculate: bool, verify: VerifyMode | None) -> None:
        """How rounds are decided from now on, while nothing runs."""
        self._ranks.note("mode", speculate, verify)
        speculate = speculate and self.gamma > 0
        self.decisions.set_mode(verify, speculate=speculate)
        if speculate != self.runner.steps.speculating:
            self.runner.steps.speculating = speculate
            # blocks computed while plain have no draft context
            for pool in self._scheduler.pools:
                pool.forget()

    def _add(self, request: Request) -> RequestFailure | None:
        try:
            self.validate(request)
        except RequestError as error:
            return RequestFailure(
                request=request,
                kind=error.kind,
                message=str(error),
                retryable=False,
                hint=error.hint,
            )
        if self._group.leads:
            self._ranks.note("add", request.to_json())
        self.stats.prompt_tokens += len(request.prompt_token_ids)
        stops = request.params.stop
        self._scheduler.add(
            Sequence(request, StopMatcher(self.tokenizer, stops) if stops else None)
        )
        return None
