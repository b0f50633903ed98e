"""What the host takes counts: steps that are cheap for the device only are not cheap."""

from typing import Any

import numpy as np
import pytest

from engine.spec.cost_table import Cell, CostTable
from engine.spec.history import Batch, Outcome
from engine.spec.host_times import HostTimes
from engine.spec.planner import Planner

G = 7


def planner_of(num: int, host: HostTimes, *, draft: float, verify: float) -> Planner:
    """Milliseconds of a draft pass and of verifying all; a plain step takes 1."""
    table = CostTable(
        fingerprint={},
        context=1,
        draft=(Cell(num, num * G, draft, 0.0),),
        plain=(Cell(num, num, 1.0, 0.0),),
        verify=(Cell(num, num * (G + 1), verify, 0.0),),
    )
    return Planner("lagged", G, num, table, None, host=host)


def test_the_longer_of_the_two_or_their_sum() -> None:
    overlapped, one_by_one = HostTimes(overlapped=True), HostTimes(overlapped=False)
    for host in (overlapped, one_by_one):
        host.note(3.0, (200, False))
    device = np.array([1.0, 5.0])
    assert overlapped.with_device(device, 250, device, drafted=True).tolist() == [3.0, 5.0]
    assert one_by_one.with_device(device, 250, device, drafted=True).tolist() == [4.0, 8.0]
    assert overlapped.with_device(1.0, 250, 250.0, drafted=False) == 3.0
    assert overlapped.with_device(1.0, 100, 100.0, drafted=False) == 1.0, (
        "another octave: not known"
    )


def test_the_least_seen_lately() -> None:
    host = HostTimes(overlapped=True)
    for ms in (9.0, 2.0, 50.0):  # a pause of the machine is forgotten at once
        host.note(ms, (1, True))
    assert host.of(1, drafted=True) == pytest.approx(2.0, rel=0.05)
    for _ in range(200):  # a host that has become slower is not
        host.note(4.0, (1, True))
    assert host.of(1, drafted=True) == 4.0
    for _ in range(200):  # beside others it says what it takes at the most
        host.note(40.0, (1, True), alone=False)
    assert host.of(1, drafted=True) == 4.0
    host.note(3.0, (1, True), alone=False)
    host.note(7.0, (9, True), alone=False)
    assert (host.of(1, drafted=True), host.of(9, drafted=True)) == (3.0, 7.0)


@pytest.mark.parametrize(("host_ms", "path"), [(0.0, "plain"), (2.5, "compact")])
def test_a_slow_host_makes_drafting_pay(host_ms: float, path: str) -> None:
    """256 requests of a small model on an H200: 1 ms a step for the device, 2.5 for the host."""
    host = HostTimes(overlapped=True)
    planner = planner_of(256, host, draft=2.2, verify=2.6)
    rows = np.arange(256)
    batch = Batch(rows, np.zeros(256, np.int64), 256)
    for t in range(1, 8):
        plan = planner.plan(batch, set())
        host.note(host_ms, (256, plan.path != "plain"))
        survival = np.tile(0.7 ** np.arange(1, G + 1), (256, 1))
        lens = np.full(256, G + 1)
        planner.observe(t, Outcome(rows, np.zeros(256, np.int64), lens, np.full(256, 3), survival))
    assert plan.path == path


@pytest.mark.parametrize(
    ("newcomers_ms", "prefill_ms", "verifies_all"),
    [(0.0, 0.0, False), (1.0, 1.0, False), (4.0, 1.0, True)],
)
def test_newcomers_that_keep_the_host_busy(
    newcomers_ms: float, prefill_ms: float, verifies_all: bool
) -> None:
    """SmolLM2, 128 requests, each ending soon: the host needs 2.6 ms a round, newcomers included.

    Rounds by themselves take it 1.7 ms, less than the device: it was thought to wait for none, and
    a round that verified 5.3 of 7 drafts took as long as one that verifies all.
    """
    host = HostTimes(overlapped=True)
    planner = planner_of(128, host, draft=0.4, verify=2.0)
    rows = np.arange(128)
    survival = np.tile(np.where(np.arange(G) < 4, 0.9, 0.1), (128, 1))
    budgets = []
    for t in range(1, 60):
        plan = planner.plan(Batch(rows, np.zeros(128, np.int64), 128), set())
        budgets.append(plan.budget or 0)
        lens, kept = np.full(128, G + 1), np.full(128, 4)
        host.note(1.7, (128, True), tokens=128 * 4)
        more: dict[str, Any] = {"alone": False, "prefill_ms": prefill_ms, "tokens": 128 * 4}
        host.note(1.7 + newcomers_ms, (128, True), **more)
        planner.observe(t, Outcome(rows, np.zeros(128, np.int64), lens, kept, survival))
    assert (budgets[-1] == 128 * G) if verifies_all else (128 < budgets[-1] < 128 * 5)


def test_what_a_turn_takes_beside_its_round() -> None:
    host = HostTimes(overlapped=True)
    of = lambda: host.with_device(0.0, 8, 10.0, drafted=True)  # noqa: E731
    host.note(1.0, (8, True), tokens=10)
    assert of() == 1.0
    host.note(10_000.0, (8, True), tokens=10)  # most of it a pause of the machine
    assert of() == pytest.approx(1.02 + (8 * 1.02) / 1.97, rel=1e-6)


def test_long_prefills_do_not_hide_the_host() -> None:
    """60 ms of the device in one turn of 20: rounds after it were thought to need no host."""
    host = HostTimes(overlapped=True)
    for turn in range(200):
        host.note(2.5, (256, False), tokens=256)
        if turn % 20 == 0:
            host.note(5.5, (256, False), alone=False, prefill_ms=60.0, tokens=256)
        assert host.with_device(1.0, 256, 256.0, drafted=False) >= 2.5
