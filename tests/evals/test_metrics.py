"""The definitions, on numbers small enough to count by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Completion, FinishReason, Request, Round, Timing
from engine.telemetry import EngineStats
from evals.metrics import (
    IdentityError,
    Window,
    acceptance,
    check_completion,
    check_counters,
    check_windows,
    itl_samples,
    latency,
    percentiles,
    request_json,
    request_speed,
    speed,
    steady_window,
    tokens_in,
    ttft,
)
from tests.evals.conftest import Make


def test_acceptance_by_hand(make: Make) -> None:
    long = make("a", [(3, 3, 4), (3, 1, 2), (3, 0, 1), (2, 2, 2)])  # the end cut the last bonus off
    short = make("b", [(3, 2, 3)])
    found = acceptance([long, short])
    assert (found.rounds, found.drafted, found.accepted, found.committed) == (5, 14, 8, 12)
    assert found.bonus == 4
    assert found.length == pytest.approx(12 / 5)
    assert found.length_per_request == pytest.approx((9 / 4 + 3) / 2)
    assert found.rate == pytest.approx(8 / 14)
    assert found.histogram == (0, 1, 2, 1, 1)
    survival = [(p.accepted, p.rounds) for p in found.positions]
    assert survival == [(4, 5), (3, 5), (1, 5)]
    assert [p.proposed for p in found.positions] == [5, 5, 4]
    # position 2: proposed 4 times, but only two of those rounds had kept positions 0 and 1
    assert [(p.accepted, p.reached) for p in found.positions] == [(4, 5), (3, 4), (1, 2)]
    assert found.positions[2].conditional == 0.5
    length = found.bonus / found.rounds + sum(p.survival or 0 for p in found.positions)
    assert found.length == pytest.approx(length)


def test_steps_without_drafts_are_no_evidence(make: Make) -> None:
    found = acceptance([make("a", [(3, 1, 2), (0, 0, 1)])])
    assert (found.rounds, found.undrafted_steps, found.length) == (1, 1, 2.0)
    assert acceptance([make("a", [])]).as_json() is None


rounds = st.integers(1, 7).flatmap(
    lambda d: st.integers(0, d).flatmap(
        lambda a: st.tuples(st.just(d), st.just(a), st.sampled_from([c for c in (a, a + 1) if c]))
    )
)


@given(st.lists(st.lists(rounds, max_size=6), max_size=5))
def test_identities_hold_for_any_rounds(requests: list[list[tuple[int, int, int]]]) -> None:
    done = [
        Completion(
            request=Request(request_id=str(at), prompt_token_ids=(1,)),
            token_ids=(0,) * (1 + sum(c for _, _, c in kept)),
            text="",
            finish_reason=FinishReason.STOP,
            stop_reason=None,
            num_cached_tokens=0,
            rounds=tuple(Round(*r) for r in kept),
            timing=Timing(0.0, ((1.0, 1), *((2.0, c) for _, _, c in kept))),
        )
        for at, kept in enumerate(requests)
    ]
    found = acceptance(done)  # asserts them
    assert sum(found.histogram) == found.rounds
    for each in done:
        check_completion(each)


@pytest.mark.parametrize("bad", [(3, 4, 5), (3, 1, 3), (3, 0, 0), (3, 2, 1)])
def test_rounds_that_contradict_themselves(make: Make, bad: tuple[int, int, int]) -> None:
    with pytest.raises(IdentityError, match="do not add up"):
        acceptance([make("a", [bad])])


def test_tokens_that_no_step_brought(make: Make) -> None:
    done = make("a", [(3, 1, 2)])
    with pytest.raises(IdentityError, match="3 timed of 4"):
        check_completion(replace(done, token_ids=(*done.token_ids, 9)))


def test_engine_counters_must_agree(make: Make) -> None:
    done = [make("a", [(3, 1, 2)])]
    after = EngineStats(rounds=6, drafted=13, accepted=11, committed=12, output_tokens=13)
    before = EngineStats(rounds=5, drafted=10, accepted=10, committed=10, output_tokens=10)
    check_counters(done, before, after)
    with pytest.raises(IdentityError, match="rounds: 1 in the requests, 2 in the engine"):
        check_counters(done, replace(before, rounds=4), after)


def test_percentiles_are_nearest_rank() -> None:
    found = percentiles([(float(k), 1) for k in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p95, found.p99, found.mean) == (50, 95, 99, 50.5)
    weighted = percentiles([(1.0, 98), (5.0, 1), (7.0, 1)])
    assert weighted is not None
    assert (weighted.p50, weighted.p95, weighted.p99, weighted.count) == (1, 1, 5, 100)
    assert percentiles([]) is None


def test_itl_is_the_gap_shared_by_its_tokens(make: Make) -> None:
    done = make("a", [(3, 3, 4), (3, 0, 1)], admitted=10.0)
    assert ttft(done) == 1.0
    assert itl_samples(done) == [(0.25, 4), (1.0, 1)]
    total = sum(seconds * count for seconds, count in itl_samples(done))
    assert total == done.timing.commits[-1][0] - done.timing.commits[0][0]
    assert request_speed(done) == pytest.approx(5 / 2)
    times = latency([done])
    assert times.itl is not None
    assert (times.itl.count, times.itl.p50, times.itl.most) == (5, 0.25, 1.0)
    line = request_json(done)
    assert (line["output_tokens"], line["rounds"], line["acceptance_length"]) == (6, 2, 2.5)


def test_windows(make: Make) -> None:
    done = [make("a", [(3, 3, 4)]), make("b", [(3, 1, 2)], admitted=1.0)]
    assert tokens_in(done, Window("run", 0.0, 3.0)) == 8
    assert tokens_in(done, Window("w", 1.0, 2.0)) == 5
    assert speed(done, Window("w", 1.0, 2.0)) == 5.0
    both = [Window("load", 0.0, 1.0), Window("run", 1.0, 3.0)]
    check_windows(both, 0.0, 3.0)
    with pytest.raises(IdentityError):
        check_windows(both, 0.0, 3.5)
    with pytest.raises(IdentityError):
        check_windows([both[0], Window("run", 1.5, 3.0)], 0.0, 3.0)


def test_steady_window_is_where_the_batch_is_full(make: Make) -> None:
    done = [make("a", [(3, 0, 1)] * 4), make("b", [(3, 0, 1)] * 2, admitted=1.0)]
    assert steady_window(done, 2) == Window("steady", 1.0, 4.0)
    assert steady_window(done, 10) is None
