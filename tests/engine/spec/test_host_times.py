"""What the host takes counts: steps that are cheap for the device only are not cheap."""

import numpy as np
import pytest

from engine.spec.cost_table import Cell, CostTable
from engine.spec.history import Batch, Outcome
from engine.spec.host_times import HostTimes
from engine.spec.planner import Planner

G = 7


def test_the_longer_of_the_two_or_their_sum() -> None:
    overlapped, one_by_one = HostTimes(overlapped=True), HostTimes(overlapped=False)
    for host in (overlapped, one_by_one):
        host.note(200, 3.0, drafted=False)
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
        host.note(1, ms, drafted=True)
    assert host.of(1, drafted=True) == pytest.approx(2.0, rel=0.05)
    for _ in range(200):  # a host that has become slower is not
        host.note(1, 4.0, drafted=True)
    assert host.of(1, drafted=True) == 4.0


@pytest.mark.parametrize(("host_ms", "path"), [(0.0, "plain"), (2.5, "compact")])
def test_a_slow_host_makes_drafting_pay(host_ms: float, path: str) -> None:
    """256 requests of a small model on an H200: 1 ms a step for the device, 2.5 for the host."""
    sizes = (256,)
    table = CostTable(
        fingerprint={},
        context=1,
        draft=tuple(Cell(r, r * G, 2.2, 0.0) for r in sizes),
        plain=tuple(Cell(r, r, 1.0, 0.0) for r in sizes),
        verify=tuple(Cell(r, r * (G + 1), 2.6, 0.0) for r in sizes),
    )
    host = HostTimes(overlapped=True)
    planner = Planner("lagged", G, 256, table, None, host=host)
    rows = np.arange(256)
    batch = Batch(rows, np.zeros(256, np.int64), 256)
    for t in range(1, 8):
        plan = planner.plan(batch, set())
        host.note(256, host_ms, drafted=plan.path != "plain")
        survival = np.tile(0.7 ** np.arange(1, G + 1), (256, 1))
        lens = np.full(256, G + 1)
        planner.observe(t, Outcome(rows, np.zeros(256, np.int64), lens, np.full(256, 3), survival))
    assert plan.path == path


@pytest.mark.parametrize(
    ("newcomers_ms", "prefill_ms", "verifies_all"),
    [(0.0, 0.0, False), (1.0, 1.0, False), (2.0, 0.5, True)],
)
def test_newcomers_that_keep_the_host_busy(
    newcomers_ms: float, prefill_ms: float, verifies_all: bool
) -> None:
    """SmolLM2, 128 requests, each ending soon: the host needs 2.6 ms a round, newcomers included.

    Rounds by themselves take it 1.7 ms, less than the device: it was thought to wait for none, and
    a round that verified 5.3 of 7 drafts took as long as one that verifies all.
    """
    sizes = (128,)
    table = CostTable(
        fingerprint={},
        context=1,
        draft=tuple(Cell(r, r * G, 0.4, 0.0) for r in sizes),
        plain=tuple(Cell(r, r, 1.0, 0.0) for r in sizes),
        verify=tuple(Cell(r, r * (G + 1), 2.0, 0.0) for r in sizes),
    )
    host = HostTimes(overlapped=True)
    planner = Planner("lagged", G, 128, table, None, host=host)
    rows = np.arange(128)
    survival = np.tile(np.where(np.arange(G) < 4, 0.9, 0.1), (128, 1))
    budgets = []
    for t in range(1, 60):
        plan = planner.plan(Batch(rows, np.zeros(128, np.int64), 128), set())
        budgets.append(plan.budget or 0)
        lens, kept = np.full(128, G + 1), np.full(128, 4)
        host.note(128, 1.7, drafted=True)
        host.note_turn(1.7 + newcomers_ms, prefill_ms, 128 * 4, (128, True))
        planner.observe(t, Outcome(rows, np.zeros(128, np.int64), lens, kept, survival))
    assert (budgets[-1] == 128 * G) if verifies_all else (128 < budgets[-1] < 128 * 5)


def test_a_pause_is_no_newcomer() -> None:
    host = HostTimes(overlapped=True)
    host.note(8, 1.0, drafted=True)
    host.note_turn(10_000.0, 0.0, 10, (8, True))
    assert host.with_device(1.0, 8, 10.0, drafted=True) == 1.0 + 8.0
    host.note_turn(1.0, 100.0, 10, (8, True))
    assert host.with_device(1.0, 8, 10.0, drafted=True) == 1.0, "prefills keep the device longer"
