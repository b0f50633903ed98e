"""Where rounds are decided: the planner, what it knows of the batch, and what is counted of it.

`Decisions.decide` and, for `sync`, `Decisions.revise` are the only places a plan comes from. What
follows of a plan (slots, padding, verify_lens, which graph) is the same wherever it is carried out.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.audit import EVERY, Audit, out_of_step
from engine.config import EngineConfig, VerifyMode
from engine.dist.group import Group
from engine.errors import CapacityError, ConfigError
from engine.kernels.acceptance import Drafts
from engine.kv.blocks import BlockPool
from engine.measurements import PAIR, read_calibration, read_cost_table
from engine.profiling import CostMeter
from engine.runner.model_runner import ModelRunner
from engine.runner.out_of_memory import first_line, is_out_of_memory
from engine.runner.pending import Launched, RoundResult
from engine.sequence import Sequence
from engine.spec.cost_table import CostTable
from engine.spec.history import LAG, Batch, Outcome
from engine.spec.host_times import HostTimes
from engine.spec.plan import Decided, Plan
from engine.spec.planner import Planner
from engine.spec.tiers import Tiers
from engine.telemetry import RoundRecord, ScheduleStats

OnResult = Callable[[Items[Sequence], RoundResult, NDArray[np.bool_]], None]

_log = logging.getLogger(__name__)


class Decisions:
    """Plans of one engine's rounds.

    Args:
        config: The settings.
        runner: Whose rounds.
        pools: Its KV blocks, by owner of the rows.
        fingerprint: Of the pair and the device, for cost tables.
        stats: Counts what is planned.
        max_model_len: Of a request.
        group: The ranks that carry plans out; rank 0 makes them.

    Raises:
        ConfigError: A file does not fit, or the drafter has nothing to go by.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        pools: Items[BlockPool],
        fingerprint: dict[str, str],
        stats: ScheduleStats,
        max_model_len: int,
        group: Group,
    ) -> None:
        self._group = group
        self._audit = Audit(group, stats, 1 if config.audit else EVERY)
        draft, gamma = runner.net.draft, runner.net.num_speculative_tokens
        self._runner, self._stats, self._gamma = runner, stats, gamma
        self._default: VerifyMode = config.verify or "lagged"
        self._has_survival = config.synthetic_acceptance is not None or (
            draft is not None and draft.spec.has_confidence
        )
        self.pair_fingerprint = {n: fingerprint[n] for n in PAIR}
        """What confidences depend on; the device has no part in it."""

        self.on_result: OnResult | None = None
        """Told what rounds brought: (members, result, which of them go on)."""

        self.on_round: Callable[[RoundRecord], None] | None = None
        """Told of every round once its result is there."""

        self._meter = CostMeter(
            runner, pools, fingerprint, max_model_len, has_survival=self._has_survival
        )
        idle = config.without_effect(
            on_cuda=runner.rows.device.type == "cuda",
            num_ranks=group.size,
            has_confidence=self._has_survival,
        )
        for text in idle:
            _log.info("%s", text)
        with group.starting():
            table = self._read(config, fingerprint) if group.rank == 0 else None
            scale = runner.steps.temperatures, runner.steps.shifts
            told = group.share([x.tolist() for x in scale])
        for x, values in zip(scale, told, strict=True):
            x.copy_(torch.tensor(values))
        self._bound = list[int]()
        self._bound_arrays = np.empty((2, 0), dtype=np.int64)
        self._measured = config.cost_table is None
        self._most_measurable = runner.rows.spare
        self.planner = Planner(
            self._check(self._default) if gamma else "all",
            gamma,
            runner.rows.spare,
            table,
            None if runner.graphs is None else Tiers(runner.rows.spare, gamma),
            fill=config.fill_tiers,
            per_request=self._has_survival,
            # a CPU does one after the other even where results are taken in late
            host=HostTimes(overlapped=runner.overlapped and runner.rows.device.type == "cuda"),
        )

    def _read(self, config: EngineConfig, fingerprint: dict[str, str]) -> CostTable | None:
        """What files say: temperatures and shifts into the steps, and a cost table."""
        calibration = read_calibration(config, self.pair_fingerprint, self._gamma)
        if calibration is not None:
            self._runner.steps.temperatures.copy_(torch.tensor(calibration.temperatures))
            self._runner.steps.shifts.copy_(torch.tensor(calibration.shifts))
        return read_cost_table(config, fingerprint)

    @property
    def has_confidence(self) -> bool:
        """Does each request have survivals of its own?"""
        return self._has_survival

    def profile(
        self,
        on_progress: Callable[[str, int, int], None],
        sizes: Items[int],
        widths: Items[int] | None,
        repeats: int | None,
    ) -> CostTable:
        """Measure a cost table for a file; nothing may run.

        Args:
            on_progress: Called with ("measure rounds", passes done, of how many).
            sizes: Batch sizes, rising.
            widths: Verify tokens per request; None: a few.
            repeats: Passes; None: a few.
        """
        return self._meter.measure(
            sizes[-1], on_progress, sizes=sizes, widths=widths, repeats=repeats
        )

    @property
    def table(self) -> CostTable | None:
        """What rounds cost; None if nobody asked yet."""
        return self.planner.table

    def _check(self, verify: VerifyMode) -> VerifyMode:
        if verify == "sync" and not self._has_survival:
            raise ConfigError(
                "--verify sync needs a drafter with a confidence head; this one has none",
                "use --verify lagged or all",
            )
        return verify

    def set_mode(self, verify: VerifyMode | None, *, speculate: bool) -> None:
        """How the next run's rounds are decided; None: as configured."""
        self.planner.plain_only = not (speculate and self._gamma)
        self.planner.mode = self._check(verify or self._default) if self._gamma else "all"

    def lack_costs(self, most: int) -> bool:
        """Does planning rounds of up to `most` requests need costs that nobody has measured?"""
        planner = self.planner
        if planner.plain_only or planner.mode == "all" or not self._measured:
            return False
        most = min(most, self._most_measurable)
        return most > 0 and (planner.table is None or planner.table.max_requests < most)

    def prepare(self, most: int, on_progress: Callable[[str, int, int], None]) -> float:
        """Measure what rounds of up to `most` requests cost; nothing may run.

        Args:
            most: Requests at once.
            on_progress: Called with ("measure rounds", done, of how many).

        Returns:
            Seconds it took.
        """
        begin = time.perf_counter()
        self._measure(min(most, self._most_measurable), on_progress)
        spent = time.perf_counter() - begin
        seconds = self._runner.clock.seconds
        seconds["warm-up"] = seconds.get("warm-up", 0.0) + spent
        return spent

    def _measure(self, most: int, on_progress: Callable[[str, int, int], None]) -> None:
        """Fill the table as far as memory goes; the run has its own way with what does not fit."""
        self._most_measurable = min(self._most_measurable, self._meter.room)
        most = min(most, self._most_measurable)
        while most:
            try:
                table = self._meter.measure(most, on_progress)
                self.planner.table = CostTable.from_json(self._group.tell(table.to_json()))
                return
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._group.size > 1:  # the others are in the middle of a round
                    raise CapacityError(
                        f"a round of {most} requests does not fit into memory: {first_line(error)}",
                        "use a smaller --max-num-seqs or --gpu-memory-utilization",
                    ) from error
            self._runner.release()
            most = self._most_measurable = most // 2

    def decide(self, batch: Items[Sequence], soon: int) -> Decided:
        """What the next round does; `soon` is as Batch has it."""
        rows, generations = self._bindings(batch)
        who = Batch(rows, generations, sum([len(s.token_ids) for s in batch]), soon)
        plan = None
        if self._group.rank == 0:
            self.planner.capture_ms = self._runner.capture_ms or self.planner.capture_ms
            plan = self.planner.plan(who, self._runner.captured(batch))
            self._count_reliability()
        plan = self._tell(plan)
        self._audit.check(plan, len(batch))
        return Decided(plan, self.planner.round, who, self.planner.predicted)

    def _bindings(self, batch: Items[Sequence]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and generations [R]; those of the round before, most often."""
        bound = [s.generation for s in batch]  # which never repeats, and says the row
        if bound != self._bound:
            self._bound, self._bound_arrays = bound, np.array([[s.row for s in batch], bound])
        rows, generations = self._bound_arrays
        return rows, generations

    def _tell(self, plan: Plan | None) -> Plan:
        """Rank 0's plan, on every rank: all enter this in every round, whatever each would do."""
        if self._group.size == 1:
            assert plan is not None
            return plan
        begin = time.perf_counter()
        told = self._group.tell(None if plan is None else plan.to_wire())
        spent = time.perf_counter() - begin
        if not isinstance(told[0], int):  # a command, of what rank 0 does next
            raise out_of_step("this rank has a round to decode where rank 0 has none")
        self._stats.plans_told += 1
        self._stats.plan_seconds += spent
        if not self._runner.clock.busy():
            self._stats.plan_exposed_seconds += spent
        return Plan.from_wire(told)

    def revise(self, decided: Decided, drafts: Drafts | None) -> Decided:
        """`sync`: how much the round verifies, once its drafts are there; waits for them."""
        if drafts is None or self.planner.mode != "sync":
            return decided
        plan = None
        if self._group.rank == 0:
            with self._runner.clock.waiting(), self._group.waiting():
                survival = self._runner.survival(drafts, decided.num_reqs)
            plan = self.planner.replan(decided.plan, survival, decided.batch.kv_tokens)
        plan = self._tell(plan)
        self._audit.check(plan, decided.num_reqs, revised=True)
        return replace(decided, plan=plan, predicted=self.planner.predicted)

    def note_turn(
        self, decided: Decided | None, seconds: float, prefill: float, tokens: int, *, alone: bool
    ) -> None:
        """What a turn took.

        Args:
            decided: Its round, if it had one.
            seconds: Of the host.
            prefill: Seconds of the device for its prefills.
            tokens: Committed in it.
            alone: Was there this round and nothing else?
        """
        round_ = None
        if decided is not None:
            round_ = decided.num_reqs, decided.plan.path != "plain"
        self.planner.host.note(
            seconds * 1e3, round_, alone=alone, prefill_ms=prefill * 1e3, tokens=tokens
        )

    def count(self, decided: Decided) -> None:
        """Count a plan that is carried out."""
        stats, budget = self._stats, decided.budget(self._gamma)
        stats.rounds[decided.plan.path] += 1
        stats.requests += decided.num_reqs
        stats.budget += budget
        stats.scheduled += decided.num_reqs + budget
        stats.tokens += decided.plan.tokens
        graphs = self._runner.graphs
        stats.eager += graphs is None
        stats.captures = 0 if graphs is None else graphs.count

    def learn(
        self, launch: Launched, result: RoundResult, going: NDArray[np.bool_], now: float
    ) -> None:
        """Take in what a round brought, once its tokens are committed.

        Args:
            launch: The round.
            result: Its result.
            going: [R] False for requests that were over before the round.
            now: Clock time of its result.
        """
        self._audit.came_back(int(result.verify_lens.sum()))
        if self._group.rank:
            return  # who does not plan has nothing to learn
        decided, members = launch.decided, [s for s, _ in launch.members]
        assert decided is not None
        if decided.predicted:
            self._stats.predicted += decided.predicted * float(going.mean())
            self._stats.realised += int(result.committed[going].sum())
        # drafts past a request's end are about text that nobody asked for
        ended = np.array([s.ended for s in members], dtype=bool)
        whole = going & ~ended
        committed = np.where(whole, result.committed, 0)
        outcome = Outcome(
            decided.batch.rows,
            decided.batch.generations,
            result.verify_lens,
            committed,
            result.survival if decided.plan.path != "plain" else None,
        )
        self.planner.observe(decided.round, outcome)
        if self.on_result is not None:
            self.on_result(members, result, whole)
        if self.on_round is not None:
            self.on_round(
                RoundRecord(
                    number=decided.round,
                    path=decided.plan.path,
                    requests=decided.num_reqs,
                    slots=decided.plan.requests,
                    budget=decided.budget(self._gamma),
                    tokens=decided.plan.tokens,
                    predicted=decided.predicted,
                    committed=int(result.committed[going].sum()),
                    begin=launch.begin,
                    launched=launch.launched,
                    end=now,
                )
            )

    def finish(self) -> None:
        """Nothing runs any more: learn from what the last rounds brought."""
        self.planner.history.settle(self.planner.round + LAG)
        self._count_reliability()

    def _count_reliability(self) -> None:
        found = self.planner.history.take_reliability()
        if found is None:
            return
        stats, (foreseen, checked, accepted) = self._stats, found
        stats.foreseen_at = _more(stats.foreseen_at, foreseen)
        stats.checked_at = _more(stats.checked_at, checked.astype(np.int64))
        stats.accepted_at = _more(stats.accepted_at, accepted.astype(np.int64))


def _more(before: list[Any], sums: NDArray[Any]) -> list[Any]:
    total: list[Any] = (np.array(before) + sums).tolist()
    return total
