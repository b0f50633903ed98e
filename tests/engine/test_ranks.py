"""Several ranks give what one gives: tiny random networks, float32, token for token.

Rows of a product that ranks sum up are rounded in another order than on one rank, so equality holds
where no two logits are closer than that; with random logits of 128 tokens the odds of such a tie
are about 1e-4 in all of a test, and its prompts are fixed. 12 heads can be dealt to 2, 3 and 4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, Request, SamplingParams
from engine.runner.batch import Members
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.deepseek_v4 import write_deepseek_v4
from tests.helpers.deepseek_v41 import write_deepseek_v41
from tests.helpers.distributed import Ranks, run_ranks
from tests.helpers.engines import make_engine, outputs, prompts, randomise, requests, teach

SHAPE: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 12, "hidden_size": 96}
TARGET = {"num_layers": 2, **SHAPE}
DRAFT = {"target_hidden_size": 96, "num_target_layers": 2, "taps": (1, 2), "num_layers": 1, **SHAPE}
PER_BLOCK = 2 * 4 * 12 * 8 * 4 * (2 + 1)  # K and V, tokens, heads, dim, bytes, layers
Outputs = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """One engine and what it is asked."""

    name: str
    draft: Path | None
    many: list[Request]
    want: Outputs
    settings: dict[str, Any]
    hit_rate: float | None = None
    """Let the drafts be right this often; None: as they are."""

    preempts: bool = False
    plans: int | None = None
    """Let rank 0 plan at random, from this seed."""

    target: Path | None = None
    """Another target than the rest's."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("t"), "Qwen3ForCausalLM", **TARGET)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("d"), **DRAFT)


def play(ranks: Ranks, target: Path, cases: list[Case]) -> None:
    for case in cases:
        model = case.target or target
        engine = make_engine(model, case.draft, group=ranks.group(), **case.settings)
        if case.hit_rate is not None:
            teach(engine, case.want, case.hit_rate)
        if case.plans is not None and ranks.rank == 0:
            randomise(engine, case.plans)
        if ranks.rank:
            engine.mirror()
            continue
        assert outputs(engine, case.many) == case.want, case.name
        assert (engine.stats.preemptions > 0) == case.preempts, case.name
        if case.hit_rate is not None and case.plans is None:
            assert engine.stats.acceptance_length > 2.0, case.name
        engine.close()


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        (
            2,
            (
                "no draft",
                "greedy on 5",
                "greedy off 5",
                "preempted on",
                "rnn off",
                "lagged on",
                "v4 on",
                "v41 on",
            ),
        ),
        (3, ("greedy on 1", "vanilla on", "rnn on", "preempted off", "random on", "sync off")),
        (4, ("greedy on 2", "greedy off 9", "vanilla off", "random off", "v4 off")),
    ],
)
def test_greedy_and_seeded_outputs_are_those_of_one_rank(
    target: Path, draft: Path, cases: dict[str, Case], size: int, chosen: tuple[str, ...]
) -> None:
    """Sharded and replicated, batches smaller than the ranks, uneven ones, preemption, plain, any
    plan: of those rank 0 decides, whatever the others would."""
    # the memory a rank is given is for its share of the heads
    dealt = [
        replace(cases[name], settings=share_memory(cases[name].settings, size)) for name in chosen
    ]
    run_ranks(play, size, target, dealt, timeout=240)


@pytest.fixture(scope="module")
def cases(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    greedy = requests(prompts(9), max_tokens=14)
    hot = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=5)
    sampled = requests(prompts(9), hot)
    mixed = [sampled[i] if i % 3 else greedy[i] for i in range(9)]
    plain = outputs(make_engine(target), greedy)
    rnn = write_draft(
        tmp_path_factory.mktemp("rnn"),
        markov="rnn",
        draft_vocab_size=61,
        sample_from_anchor=False,
        **DRAFT,
    )
    many = [Case("no draft", None, greedy, plain, {})]
    for loop in ("on", "off"):
        for seqs in (1, 2, 5, 9):
            settings = {"max_num_seqs": seqs, "sharded_loop": loop}
            many.append(Case(f"greedy {loop} {seqs}", draft, greedy, plain, settings, 0.7))
        for name, path in (("vanilla", draft), ("rnn", rnn)):
            settings = {"max_num_seqs": 4, "sharded_loop": loop, "max_num_batched_tokens": 11}
            want = outputs(make_engine(target, path), mixed)
            many.append(Case(f"{name} {loop}", path, mixed, want, settings))
        for verify in ("lagged", "sync"):
            settings = {"max_num_seqs": 6, "sharded_loop": loop, "verify": verify}
            many.append(Case(f"{verify} {loop}", draft, greedy, plain, settings))
        settings = {"max_num_seqs": 7, "sharded_loop": loop}
        many.append(Case(f"random {loop}", draft, greedy, plain, settings, 0.7, plans=3))
        settings = {
            "max_num_seqs": 9,
            "max_model_len": 64,
            "sharded_loop": loop,
            "kv_cache_memory_bytes": 18 * PER_BLOCK,
        }
        many.append(Case(f"preempted {loop}", draft, greedy, plain, settings, 0.7, True))
    # DeepSeek-V4: heads by output group, experts whole; its 4 groups go to 2 and 4 ranks
    v4 = write_deepseek_v4(tmp_path_factory.mktemp("v4"))
    few = requests(prompts(3, seed=5, longest=20), max_tokens=10)
    want = outputs(make_engine(v4), few)
    for loop in ("on", "off"):
        settings = {"max_num_seqs": 3, "sharded_loop": loop}
        many.append(Case(f"v4 {loop}", v4, few, want, settings, target=v4))
    v41 = write_deepseek_v41(tmp_path_factory.mktemp("v41") / "v41")
    settings = {"max_num_seqs": 3, "sharded_loop": "on"}
    want = outputs(make_engine(v41), few)
    many.append(Case("v41 on", v41, few, want, settings, target=v41))
    return {case.name: case for case in many}


def share_memory(settings: dict[str, Any], size: int) -> dict[str, Any]:
    name = "kv_cache_memory_bytes"
    return {**settings, name: settings[name] // size} if name in settings else settings


def logits_at_owners(ranks: Ranks, target: Path, draft: Path, num_reqs: int) -> None:
    """Draft logits of ceil(R/N) requests are held, sharded or not; drafts of all are known."""
    hot = SamplingParams(max_tokens=8, temperature=1.0, seed=1)
    for loop in ("on", "off"):
        group = ranks.group()
        settings = {"max_num_seqs": num_reqs, "sharded_loop": loop}
        engine = make_engine(target, draft, group=group, **settings)
        seen = watch_drafts(engine)
        if ranks.rank:
            engine.mirror()
        else:
            outputs(engine, requests(prompts(num_reqs), hot))
            engine.close()
        shape = (-(-num_reqs // ranks.size), 4, 128)
        assert seen[0] == ((num_reqs, 4), shape), seen[0]


def watch_drafts(engine: Engine) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    seen = []
    real: Callable[..., Any] = engine.runner._draft

    def draft(members: Members) -> Any:
        drafts = real(members)
        assert drafts.logits is not None
        seen.append((tuple(drafts.token_ids.shape), tuple(drafts.logits.shape)))
        return drafts

    engine.runner._draft = draft  # type: ignore[method-assign]
    return seen


def test_draft_logits_exist_at_their_owner_only(target: Path, draft: Path) -> None:
    for size, num_reqs in ((2, 5), (3, 2)):
        run_ranks(logits_at_owners, size, target, draft, num_reqs)


def poisoned_padding(ranks: Ranks, target: Path, draft: Path, want: Outputs) -> None:
    """What is left over in an owner's room changes nothing, whatever is in fresh memory."""
    real = torch.empty_like
    torch.empty_like = lambda *a, **k: real(*a, **k).fill_(-7)  # type: ignore[assignment]
    engine = make_engine(target, draft, group=ranks.group(), sharded_loop="on")
    if ranks.rank:
        engine.mirror()
        return
    assert outputs(engine, requests(prompts(3), max_tokens=12)) == want
    engine.close()


def test_rule_7_room_left_over_is_inert(target: Path, draft: Path) -> None:
    want = outputs(make_engine(target), requests(prompts(3), max_tokens=12))
    run_ranks(poisoned_padding, 4, target, draft, want)


def several_runs(ranks: Ranks, target: Path, draft: Path, plain: Outputs) -> None:
    engine = make_engine(target, draft, group=ranks.group(), max_num_seqs=3)
    if ranks.rank:
        engine.mirror()
        assert engine.stats.kv_blocks_used == 0
        return
    many = requests(prompts(6), max_tokens=12)
    halfway = engine.run(many)
    assert next(halfway).token_ids in plain.values()  # type: ignore[union-attr]
    halfway.close()  # drops the others, on every rank
    assert outputs(engine, many) == plain
    done = {c.request.request_id: c.token_ids for c in engine.run(many, speculate=False)}  # type: ignore[union-attr]
    assert done == plain
    assert engine.top_logits(many[0].prompt_token_ids)[0][0] == plain["0"][0]
    assert outputs(engine, many) == plain
    engine.close()


def test_runs_left_early_and_switched_to_plain_stay_in_step(target: Path, draft: Path) -> None:
    plain = outputs(make_engine(target), requests(prompts(6), max_tokens=12))
    run_ranks(several_runs, 2, target, draft, plain)
