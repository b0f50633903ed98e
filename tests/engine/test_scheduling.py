"""Rule 1 with scheduling: whatever is verified, drafted greedy output is plain greedy output."""

import os
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, Engine, SamplingParams
from engine.spec.cost_table import Cell, CostTable
from engine.spec.plan import Plan
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.drafts import EOS
from tests.helpers.engines import (
    complete,
    make_engine,
    outputs,
    prompts,
    randomise,
    requests,
    teach,
)
from tests.helpers.host_graphs import use_host_graphs

GAMMA = 4
SEEDS = range(4 if "DSPARK_FULL" in os.environ else 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "target", "Qwen3ForCausalLM"), write_draft(folder / "draft")


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> dict[str, tuple[int, ...]]:
    return outputs(make_engine(pair[0], max_num_seqs=1), requests(prompts(12)))


@pytest.fixture(scope="module")
def target_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, tuple[int, ...]]]:
    folder = write_target(tmp_path_factory.mktemp("alone") / "target", "Qwen3ForCausalLM")
    many = requests(prompts(60, longest=6), max_tokens=9)
    many = [replace(r, params=replace(r.params, max_tokens=1 + i % 9)) for i, r in enumerate(many)]
    return folder, outputs(make_engine(folder, max_num_seqs=4), many)


def cost_table(token: float, plain: float = 4.0) -> CostTable:
    """1 ms for a draft pass, `plain` for a step, `token` for each further token."""
    sizes = (1, 16)
    return CostTable(
        fingerprint={},
        context=1,
        draft=tuple(Cell(r, r * GAMMA, 1.0, 0.0) for r in sizes),
        plain=tuple(Cell(r, r, plain, 0.0) for r in sizes),
        verify=tuple(Cell(r, r * (GAMMA + 1), plain + r * GAMMA * token, 0.0) for r in sizes),
    )


@pytest.mark.parametrize("asked_again", [False, True])
def test_rows_that_start_together_have_the_outputs_of_any(
    target_alone: tuple[Path, dict[str, tuple[int, ...]]], asked_again: bool
) -> None:
    """32 rows, two newcomers at a time; and where no more may come yet, whoever is there."""
    folder, want = target_alone
    engine = make_engine(folder, max_num_seqs=32)
    started: list[int] = []
    real = engine.runner.start

    def start(sequences: list[Any]) -> None:
        started.append(len(sequences))
        real(sequences)

    engine.runner.start = start  # type: ignore[method-assign]
    many = requests(prompts(60, longest=6), max_tokens=9)
    many = [replace(r, params=replace(r.params, max_tokens=1 + i % 9)) for i, r in enumerate(many)]
    source = (x for r in many for x in ((r, None) if asked_again else (r,)))
    got = {c.request.request_id: c.token_ids for c in engine.run(source)}  # type: ignore[union-attr]
    assert got == want
    assert sum(started) == 60
    if not asked_again:
        assert started[0] == 32
        assert min(started[1:-1]) >= 2


def schedule(engine: Engine, mode: str, table: CostTable) -> None:
    """Give an engine made for `--verify all` another mode and costs that are not measured."""
    engine.decisions._default = mode  # type: ignore[assignment]
    engine.decisions.planner.table = table
    engine.decisions._measured = False
    engine.decisions.note_turn = lambda *_, **__: None  # type: ignore[method-assign]


VARIATIONS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1},
    "batched": {},
    "wide": {"max_num_seqs": 12},
    "chunked prefill": {"max_num_batched_tokens": 5, "max_num_seqs": 12},
    "no prefix cache": {"enable_prefix_caching": False},
    "shorter drafts": {"num_speculative_tokens": 2},
    "preemption": {
        "max_num_seqs": 12,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 20 * 2 * 4 * 2 * 8 * 4 * (3 + 2),
    },
}


@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("hit_rate", [0.3, 0.9])
def test_rule_1_any_plan(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], name: str, hit_rate: float
) -> None:
    engine = make_engine(*pair, **VARIATIONS[name])
    teach(engine, plain, hit_rate)
    for seed in SEEDS:
        randomise(engine, seed)
        assert outputs(engine, requests(prompts(12))) == plain
    assert engine.stats.schedule.rounds["plain"] > 0
    assert engine.stats.schedule.padding_share > 0
    if name == "preemption":
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("late", [False, True])
def test_rule_1_any_plan_from_graphs(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], late: bool
) -> None:
    """Replays of every tier, each with another geometry than the last time."""
    engine = make_engine(*pair, max_num_seqs=6, overlap="on" if late else "off")
    graphs = use_host_graphs(engine)
    for width in (6, 5, 3, 1):
        randomise(engine, width)
        ran = engine.run(requests(prompts(12)), max_num_seqs=width)
        assert {c.request.request_id: c.token_ids for c in ran} == plain
    assert graphs.count > 20
    assert engine.stats.schedule.eager == 0
    assert engine.stats.schedule.padding_share > 0


@pytest.mark.parametrize("mode", ["lagged", "sync"])
def test_rule_1_planned_rounds_from_graphs(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], mode: str
) -> None:
    for fill in (True, False):
        engine = make_engine(*pair, max_num_seqs=6, fill_tiers=fill)
        graphs = use_host_graphs(engine)
        schedule(engine, mode, cost_table(0.4))
        assert outputs(engine, requests(prompts(12))) == plain
        assert 2 <= graphs.count < 30
        assert engine.stats.schedule.rounds["compact"] > 0


@pytest.mark.parametrize("mode", ["lagged", "sync"])
@pytest.mark.parametrize("token", [0.0, 0.3, 1.5, 8.0])
def test_rule_1_planned_rounds(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], mode: str, token: float
) -> None:
    for late in (False, True):
        # late: as on a CUDA device, results are taken in while the next round runs
        engine = make_engine(*pair, max_num_seqs=5, overlap="on" if late else "off")
        schedule(engine, mode, cost_table(token))
        if not late:  # taught drafts go by what the host knows
            teach(engine, plain, 0.8)
        assert outputs(engine, requests(prompts(12))) == plain
        done = engine.stats.schedule
        assert done.tokens == done.scheduled
        assert done.rounds["full"] == 0
        if token == 0.0:
            assert done.rounds["compact"] > 0
        if token == 8.0 and mode == "lagged":
            assert done.rounds["plain"] > done.rounds["compact"]


def test_plain_rounds_keep_the_draft_context(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    """A draft after plain rounds is the draft that rounds of nothing but drafts would make."""
    seen: list[dict[tuple[int, ...], list[int]]] = []
    for mixed in (False, True):
        engine = make_engine(*pair, max_num_seqs=3)
        if mixed:
            randomise(engine, 5)
        drafts: dict[tuple[int, ...], list[int]] = {}
        real = engine.runner._draft

        def draft(members: Any, real: Any = real, drafts: Any = drafts) -> Any:
            made = real(members)
            for sequence, ids in zip(members.sequences, made.token_ids.tolist(), strict=True):
                drafts[tuple(sequence.token_ids)] = ids
            return made

        engine.runner._draft = draft  # type: ignore[method-assign]
        assert outputs(engine, requests(prompts(12))) == plain
        seen.append(drafts)
    shared = seen[0].keys() & seen[1].keys()
    assert len(shared) > 60
    assert all(seen[0][tokens] == seen[1][tokens] for tokens in shared)


def test_what_was_not_verified_is_not_counted(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(*pair, max_num_seqs=4)
    teach(engine, plain, 1.0)
    randomise(engine, 1)
    done = complete(engine, requests(prompts(12))).values()
    stats = engine.stats
    rounds = [r for c in done for r in c.rounds]
    assert all(1 <= r.drafted <= GAMMA for r in rounds)
    assert stats.rounds == len(rounds) < stats.schedule.requests
    assert stats.drafted == sum(r.drafted for r in rounds) <= stats.schedule.budget
    assert stats.drafted_at == sorted(stats.drafted_at, reverse=True)
    # perfect drafts: each verified one stays, unless the sequence ended before it
    assert stats.accepted == stats.drafted
    for c in done:
        steps = len(c.timing.commits) - 1 - len(c.rounds)
        assert len(c.token_ids) == 1 + sum(r.committed for r in c.rounds) + steps
        assert EOS in c.token_ids or len(c.token_ids) == 24


def test_predictions_are_held_against_what_came(pair: tuple[Path, Path]) -> None:
    engine = make_engine(*pair)
    schedule(engine, "lagged", cost_table(0.1))
    complete(engine, requests(prompts(12), SamplingParams(max_tokens=60, ignore_eos=True)))
    done = engine.stats.schedule
    assert done.predicted > done.realised > 0
    assert sum(done.checked_at) > 100
    assert done.calibration_error is not None
    # random weights: confidences near 1/2 of drafts that never stay
    assert 0.1 < done.calibration_error < 0.9
    assert done.accepted_at <= done.checked_at


@pytest.mark.parametrize("mode", ["all", "lagged"])
@pytest.mark.parametrize("late", [False, True])
def test_all_that_came_is_counted_with_the_last_result(
    pair: tuple[Path, Path], mode: Any, late: bool
) -> None:
    """Replicas tell what they have counted as they hand it out: the last rounds were missing."""
    engine = make_engine(*pair, max_num_seqs=2, overlap="on" if late else "off")
    schedule(engine, mode, cost_table(0.1))
    done, at_last = engine.stats.schedule, [0]
    for _ in engine.run(requests(prompts(2), max_tokens=3), verify=mode):
        at_last = list(done.checked_at)
    assert sum(at_last) > 0
    assert at_last == done.checked_at


def test_sampled_rows_commit_prefixes_whatever_the_budget(pair: tuple[Path, Path]) -> None:
    """Rounds from one state: a smaller budget commits the beginning of what a larger one does."""
    hot = SamplingParams(max_tokens=24, temperature=30.0, seed=3)  # near uniform: drafts stay
    committed = []
    for budget in (0, 3, 7, 6 * GAMMA):
        engine = make_engine(*pair, max_num_seqs=6)
        planner = engine.decisions.planner
        planner.plan = lambda batch, _captured, b=budget: Plan(  # type: ignore[method-assign]
            "compact", min(b, GAMMA * len(batch.rows)), len(batch.rows), len(batch.rows) + b
        )
        first: dict[str, list[int]] = {}
        take = engine.commits.take

        def note(results: Any, now: float, *, take: Any, first: Any) -> Any:
            results = list(results)
            for sequence, tokens, verify_len in results:
                if verify_len:
                    first.setdefault(sequence.request.request_id, list(tokens))
            return take(results, now)

        engine.commits.take = partial(note, take=take, first=first)  # type: ignore[method-assign]
        complete(engine, requests(prompts(6), hot))
        committed.append(first)
    for less, more in pairwise(committed):
        for name, tokens in less.items():
            assert more[name][: len(tokens)] == tokens
    assert {len(t) for t in committed[0].values()} == {1}
    assert sum(map(len, committed[-1].values())) > len(committed[-1])


def test_without_a_confidence_head(tmp_path: Path, plain: dict[str, tuple[int, ...]]) -> None:
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d", confidence=False)
    engine = make_engine(target, draft)
    for token, path in ((0.0, "full"), (8.0, "plain")):
        schedule(engine, "lagged", cost_table(token))
        teach(engine, plain, 0.9)
        before = dict(engine.stats.schedule.rounds)
        assert outputs(engine, requests(prompts(12))) == plain
        made = {p: n - before[p] for p, n in engine.stats.schedule.rounds.items()}
        assert made["compact"] == 0
        assert made[path] == max(made.values())
    with pytest.raises(ConfigError, match="confidence head"):
        list(engine.run(requests(prompts(1)), verify="sync"))
    with pytest.raises(ConfigError, match="confidence head"):
        make_engine(target, draft, verify="sync")


def test_confidences_that_are_no_numbers_cost_no_run(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(*pair)
    schedule(engine, "sync", cost_table(0.2))
    draft = engine.runner.net.draft
    assert draft is not None
    assert draft.confidence_bias is not None
    draft.confidence_bias = torch.full_like(draft.confidence_bias, float("nan"))
    assert outputs(engine, requests(prompts(12))) == plain
