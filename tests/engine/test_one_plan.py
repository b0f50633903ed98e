"""One plan for all ranks, whatever each of them believes; and what becomes of ranks that differ."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.audit import EVERY, Audit, DivergenceError, Facts, _divergence
from engine.dist.control import RankError
from engine.dist.group import Group
from engine.errors import DSparkError
from engine.lockstep import Lockstep
from engine.planning import Decisions
from engine.spec.cost_table import Cell, CostTable
from engine.spec.plan import Plan
from engine.telemetry import ScheduleStats
from tests.e2e.test_demo import heldout
from tests.helpers.distributed import Ranks, run_ranks
from tests.helpers.engines import make_engine, outputs, requests
from tests.helpers.own_plans import OwnPlans

FULL = "DSPARK_FULL" in os.environ
DEMO = Path(__file__).parents[2] / "examples" / "demo"
GAMMA, MOST = 7, 6
LIMITS: dict[str, Any] = {"max_num_seqs": MOST, "max_model_len": 512, "kv_block_size": 16}
LIMITS["kv_cache_memory_bytes"] = 16 << 20


@dataclass(frozen=True)
class Case:
    verify: str
    overlap: str
    loop: str
    trouble: str
    cut: bool = False
    """Is nobody told rank 0's plan?"""

    audit: bool = True


KEPT = (
    Case("lagged", "on", "off", "late"),
    Case("sync", "off", "on", "none"),
    Case("lagged", "off", "on", "none"),
    Case("sync", "on", "off", "late"),
)
CUT = (
    Case("lagged", "on", "on", "late", cut=True),
    Case("sync", "off", "off", "none", cut=True),
    Case("lagged", "off", "off", "late", cut=True),
    Case("sync", "on", "on", "none", cut=True),
)


def costs() -> CostTable:
    """A further token costs so much that about half the drafts are worth a look."""
    sizes = (1, MOST)
    return CostTable(
        fingerprint={},
        context=1,
        draft=tuple(Cell(r, r * GAMMA, 10.0, 0.0) for r in sizes),
        plain=tuple(Cell(r, r, 300.0, 0.0) for r in sizes),
        verify=tuple(
            Cell(r, r * w, 300.0 + r * (w - 1) * 45.0, 0.0) for r in sizes for w in (2, 8)
        ),
    )


def play(ranks: Ranks, cases: list[Case], many: list[Any], want: dict[str, Any]) -> None:
    compare_by_the_way(ranks)
    for case in cases:
        engine = make_engine(
            DEMO / "target",
            DEMO / "drafter",
            group=ranks.group(),
            sharded_loop=case.loop,
            overlap=case.overlap,
            verify=case.verify,
            audit=case.audit,
            **LIMITS,
        )
        engine.decisions.planner.table, engine.decisions._measured = costs(), False
        trouble = case.trouble if ranks.rank == ranks.size - 1 else ""
        plans = OwnPlans(engine, ranks.rank, trouble, cut=case.cut)
        # the group goes with its engine
        (cut if case.cut else kept)(ranks, engine, plans, case, many, want)


def kept(
    ranks: Ranks, engine: Any, plans: OwnPlans, case: Case, many: list[Any], want: Any
) -> None:
    """Outputs are those of one rank, and the plans rank 0's."""
    if ranks.rank:
        engine.mirror()
    else:
        assert outputs(engine, many) == want, case
        engine.close()
    done = engine.stats.schedule
    twice = case.verify == "sync"
    rounds = sum(done.rounds.values())
    assert rounds >= 10, rounds
    assert done.audits == done.plans_told == len(plans.told)
    assert rounds < done.audits <= 2 * rounds if twice else done.audits == rounds
    assert done.audit_seconds > 0
    assert 0 < done.plan_exposed_seconds == done.plan_seconds, "a CPU has no queue"
    told = gathered(ranks, f"told {case}", repr(plans.told))
    assert all(each == told[0] for each in told), case
    assert any(plan.budget for plan in plans.told)
    own = gathered(ranks, f"own {case}", repr(plans.own))
    assert own[0] == told[0]
    assert own[-1] != told[0], "the last rank had other plans, and gave way"


def cut(
    ranks: Ranks, engine: Any, plans: OwnPlans, case: Case, many: list[Any], _want: Any
) -> None:
    begin = time.monotonic()
    work = engine.mirror if ranks.rank else lambda: outputs(engine, many)
    with pytest.raises(DivergenceError) as info:
        work()
    assert time.monotonic() - begin < 20.0
    said = gathered(ranks, f"said {case}", str(info.value))
    assert all(text == said[0] for text in said), "every rank says the same"
    assert said[0].startswith("the ranks do not carry out the same rounds: in round ")
    field = "path" if case.trouble == "none" else "(path|budget|tier of tokens)"
    assert info.match(f"in round {engine.decisions._audit._round} the {field} is .* on rank 0, ")
    assert info.match(f" on rank {ranks.size - 1}$")
    assert info.value.exit_code == 1
    assert "finished rows are kept" in info.value.hint
    assert len(plans.own) < 60
    engine.close()


def gathered(ranks: Ranks, name: str, text: str) -> list[str]:
    """Every rank's text, over the store: the group may be gone."""
    ranks.store.set(f"{name} {ranks.rank}", text)
    return [ranks.store.get(f"{name} {r}").decode() for r in range(ranks.size)]


def compare_by_the_way(ranks: Ranks) -> None:
    """Not asked for, ranks are compared every 64 rounds; the round that differed is found."""
    group, stats = ranks.group(), ScheduleStats()
    audit = Audit(group, stats, EVERY)
    for number in range(1, 2 * EVERY):
        off = number == 70 and ranks.rank == ranks.size - 1
        audit.check(Plan("compact", 5 + off, 4, 12), 4)
        audit.came_back(9)
    with pytest.raises(DivergenceError, match=r"in round 70 the budget is 5 on rank 0, .*6 on"):
        audit.check(Plan("compact", 5, 4, 12), 4)
    assert stats.audits == 1
    group.close()


@pytest.mark.parametrize("size", [2, *([4] if FULL else [])])
def test_rank_0s_plan_is_carried_out_and_differences_end_all_ranks(size: int) -> None:
    alone = make_engine(DEMO / "target", **LIMITS)
    chats = [
        alone.tokenizer.encode_chat([{"role": "user", "content": row["question"]}])
        for row in heldout()[:9]
    ]
    many = requests(chats, max_tokens=32)
    # two of each; DSPARK_FULL: all of them, on four ranks as well
    cases = [*KEPT, *CUT] if FULL else [*KEPT[:2], *CUT[:2]]
    run_ranks(play, size, cases, many, outputs(alone, many), timeout=240)


FACTS = Facts(3, 4, 2, 5, 4, 12, 9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"round": 4}, "the number of the round is 3 on rank 0, 4 on rank 1"),
        ({"requests": 5}, "in round 3 the requests in it is 4 on rank 0, 5 on rank 1"),
        ({"path": 0, "budget": -1}, "in round 3 the path is compact on rank 0, plain on rank 1"),
        ({"budget": -1}, "in round 3 the budget is 5 on rank 0, none on rank 1"),
        ({"slots": 5}, "in round 3 the tier of requests is 4 on rank 0, 5 on rank 1"),
        ({"tokens": 16}, "in round 3 the tier of tokens is 12 on rank 0, 16 on rank 1"),
        (
            {"verify_lens": 8},
            "in round 3 the sum of verify_lens of the latest round that came back is 9 on rank 0, "
            "8 on rank 1",
        ),
    ],
)
def test_the_first_difference_is_told(changed: dict[str, int], message: str) -> None:
    before, after = FACTS._replace(round=2), FACTS._replace(round=4, path=1)
    other = [before, FACTS._replace(**changed), after._replace(budget=1)]
    assert str(_divergence([[before, FACTS, after], other])).endswith(message)


def test_ranks_that_counted_differently_are_told_so() -> None:
    error = _divergence([[FACTS], [FACTS, FACTS]])
    assert str(error).endswith("rounds since the last comparison are 1 on rank 0, 2 on rank 1")
    assert isinstance(error, RankError)


def test_a_rank_without_rank_0s_round_says_so() -> None:
    """A message of another kind than awaited used to be an error of Python's."""
    told = iter(([2, 5, 4, 12], [["step"]]))
    group: Any = SimpleNamespace(tell=lambda _message: next(told), size=2)
    with pytest.raises(DSparkError, match="rank 0 has a round to decode where this rank has none"):
        next(Lockstep(group).commands())
    here: Any = SimpleNamespace(_group=group)
    with pytest.raises(DSparkError, match="has a round to decode where rank 0 has none"):
        Decisions._tell(here, None)


def test_one_rank_compares_nothing() -> None:
    stats = ScheduleStats()
    audit = Audit(Group(), stats, 1)
    audit.check(Plan("plain", None, 1, 1), 1)
    assert stats.audits == 0
