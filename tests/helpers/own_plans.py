"""A rank that plans for itself, too, from what it alone believes: to be overruled, or not."""

import time
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine import Engine
from engine.kernels.acceptance import Drafts
from engine.runner.pending import Launched, RoundResult
from engine.sequence import Sequence
from engine.spec.history import Outcome
from engine.spec.plan import Decided, Plan

NOISE = 1e-3


class OwnPlans:
    """Makes a rank's engine plan on its own beside what rank 0 tells, and keeps both.

    Args:
        engine: One rank's.
        rank: Seeds the noise of its confidences.
        trouble: `late`: its results arrive a while after the others', and its planner hears of them
            three rounds later; `none`: its own budget is always None; ``: neither.
        cut: Carry out the own plan: nobody is told anything.
    """

    def __init__(self, engine: Engine, rank: int, trouble: str = "", *, cut: bool = False) -> None:
        self.told: list[Plan] = []
        self.own: list[Plan] = []
        self._engine, self._decisions = engine, engine.decisions
        self._rank, self._trouble, self._cut = rank, trouble, cut
        self._rng = np.random.default_rng(rank)
        self._mine: Plan | None = None
        self._heard: deque[tuple[int, Outcome]] = deque()
        self._real = {
            name: getattr(self._decisions, name) for name in ("decide", "revise", "learn", "_tell")
        }
        for name in ("decide", "revise", "learn"):
            setattr(self._decisions, name, getattr(self, f"_{name}"))
        self._decisions._tell = self._tell  # type: ignore[method-assign]
        self._perturb()

    def _perturb(self) -> None:
        """Confidences of this rank are off by up to NOISE before any rank hears of them."""
        draft = self._engine.runner.net.draft
        assert draft is not None
        real, generator = draft.confidence, torch.Generator().manual_seed(self._rank)

        def confidence(*given: Any) -> torch.Tensor:
            logits = real(*given)
            assert logits is not None
            return logits + NOISE * (2 * torch.rand(logits.shape, generator=generator) - 1)

        draft.confidence = confidence  # type: ignore[method-assign]

    def _decide(self, batch: Items[Sequence], soon: int) -> Decided:
        if self._rank:
            rows, generations = ([getattr(s, n) for s in batch] for n in ("row", "generation"))
            who = type("Who", (), {})  # what a planner looks at
            who.rows, who.generations = np.array(rows), np.array(generations)
            who.kv_tokens, who.soon = sum(len(s.token_ids) for s in batch), soon
            captured = self._engine.runner.captured(batch)
            self._mine = self._decisions.planner.plan(who, captured)  # type: ignore[arg-type]
        return self._real["decide"](batch, soon)  # type: ignore[no-any-return]

    def _revise(self, decided: Decided, drafts: Drafts | None) -> Decided:
        planner = self._decisions.planner
        if self._rank and drafts is not None and planner.mode == "sync":
            survival = self._engine.runner.survival(drafts, decided.num_reqs)
            self._mine = planner.replan(decided.plan, survival, decided.batch.kv_tokens)
        return self._real["revise"](decided, drafts)  # type: ignore[no-any-return]

    def _tell(self, plan: Plan | None) -> Plan:
        mine = self._mine if plan is None else plan
        assert mine is not None
        if self._rank and self._trouble == "none":
            mine = replace(mine, path="full", budget=None)
        self.own.append(mine)
        self.told.append(mine if self._cut else self._real["_tell"](plan))
        return self.told[-1]

    def _learn(self, launch: Launched, result: RoundResult, *rest: Any) -> None:
        late = self._trouble == "late"
        if late:
            time.sleep(0.002)
        self._real["learn"](launch, result, *rest)
        if not self._rank or launch.decided is None:
            return
        survival = result.survival
        if survival is not None:
            noise = NOISE * (2 * self._rng.random(survival.shape) - 1)
            survival = np.clip(survival + noise, 0.0, 1.0)
        who = launch.decided.batch
        outcome = Outcome(who.rows, who.generations, result.verify_lens, result.committed, survival)
        self._heard.append((launch.decided.round, outcome))
        while len(self._heard) > (3 if late else 0):
            self._decisions.planner.observe(*self._heard.popleft())
