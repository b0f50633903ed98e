"""Engines over tiny checkpoints, and drafts that are right as often as a test wants."""

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine import Completion, Engine, EngineConfig, Request, SamplingParams
from engine.dist.group import Group
from engine.kernels.acceptance import Drafts
from engine.runner.batch import Members
from engine.spec.history import Batch
from engine.spec.plan import Plan


def make_engine(
    model: Path, draft: Path | None = None, *, group: Group | None = None, **settings: Any
) -> Engine:
    """A float32 CPU engine with small limits; with a group, one rank of it."""
    defaults: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": 4,
        "kv_block_size": 4,
        "max_model_len": 256,
        "threads": 1,
        # what a test counts is not to depend on how long rounds take
        "verify": "all" if draft else None,
    }
    config = {**defaults, **settings}
    name = str(draft) if draft else None
    return Engine(EngineConfig(model=str(model), draft=name, **config), group=group)


def prompts(count: int, seed: int = 0, vocab: int = 128, longest: int = 40) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens, without special ones."""
    rng = random.Random(seed)
    return [[rng.randrange(4, vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def requests(
    many: Items[Items[int]], params: SamplingParams | None = None, **fields: Any
) -> list[Request]:
    """One request a prompt; the id is the prompt's index."""
    shared = params or SamplingParams(**{"max_tokens": 24, **fields})
    return [
        Request(request_id=str(i), prompt_token_ids=tuple(p), params=shared)
        for i, p in enumerate(many)
    ]


def complete(engine: Engine, many: Items[Request]) -> dict[str, Completion]:
    """Run to the end; every request must complete."""
    out = list(engine.run(many))
    assert all(isinstance(c, Completion) for c in out), out
    done = {c.request.request_id: c for c in out if isinstance(c, Completion)}
    assert len(done) == len(out) == len(many)
    return done


def outputs(engine: Engine, many: Items[Request]) -> dict[str, tuple[int, ...]]:
    """Run to the end; output ids by request id."""
    return {i: c.token_ids for i, c in complete(engine, many).items()}


def teach(
    engine: Engine, answers: dict[str, tuple[int, ...]], hit_rate: float, seed: int = 0
) -> None:
    """Make the engine's drafts follow `answers`, each token right with probability `hit_rate`.

    Random networks never agree, so acceptance needs help. The real draft still runs.
    """
    rng, steps = random.Random(seed), engine.runner.steps
    real: Callable[..., Drafts] = steps.draft

    def draft(members: Members, *, sampled: bool) -> Drafts:
        drafts = real(members, sampled=sampled)
        if members.index.is_cuda and engine.runner.graphs is not None:
            return drafts  # a capture: nothing of this would be in it
        ids = drafts.token_ids.clone()
        running = {s.row: s for s in engine.running}
        for r, row in enumerate(members.index.tolist()):
            if (s := running.get(row)) is None:  # padding
                continue
            # the host may not know yet how far it is
            done = int(steps.rows.num_computed[row]) + 1 - s.num_prompt
            rest = answers[s.request.request_id][done:]
            for k in range(ids.shape[1]):
                if k < len(rest) and rng.random() < hit_rate:
                    ids[r, k] = rest[k]
        return replace(drafts, token_ids=ids)

    steps.draft = draft  # type: ignore[method-assign]


def randomise(engine: Engine, seed: int) -> None:
    """Any plan at all, in place of good ones."""
    rng, planner = random.Random(seed), engine.decisions.planner

    def plan(batch: Batch, _captured: object) -> Plan:
        planner.round += 1
        num, tiers = len(batch.rows), planner._tiers
        slots = num if tiers is None else tiers.fit(num)
        path = rng.choice(["plain", "full", "compact", "compact", "compact"])
        if path == "plain":
            return Plan("plain", None, slots, slots)
        if path == "full":
            return Plan("full", None, slots, slots * (engine.gamma + 1))
        if tiers is not None:
            tokens = rng.choice(tiers.tokens(slots))
            return Plan("compact", rng.randint(0, tokens - num), slots, tokens)
        budget = rng.choice([0, 1, num, rng.randint(0, num * engine.gamma), num * engine.gamma])
        budget = min(budget, num * engine.gamma)
        padding = rng.choice([0, 0, 3])
        return Plan("compact", budget, num, num + budget + padding)

    planner.plan = plan  # type: ignore[method-assign]


def record_drafts(engine: Engine) -> list[tuple[list[int], list[int], torch.Tensor | None]]:
    """Collect (tokens up to the anchor, drafts, confidence logits) of every draft made."""
    seen: list[tuple[list[int], list[int], torch.Tensor | None]] = []
    steps = engine.runner.steps
    real: Callable[..., Drafts] = steps.draft

    def draft(members: Members, *, sampled: bool) -> Drafts:
        drafts = real(members, sampled=sampled)
        confidence = steps.last_confidence
        for r, s in enumerate(members.sequences):
            logits = None if confidence is None else confidence[r].clone()
            seen.append((list(s.token_ids), drafts.token_ids[r].tolist(), logits))
        return drafts

    steps.draft = draft  # type: ignore[method-assign]
    return seen
