"""Throughput: order of passes, windows, identities and the crossover, on a clock of the test's."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from engine.errors import DSparkError
from engine.request import Completion, Request, RequestFailure, Round, SamplingParams
from evals.numbers import IdentityError
from evals.throughput import (
    Plan,
    Point,
    Spread,
    crossover,
    measure,
    run_pass,
    speed_of,
    steady_speed_of,
)
from evals.throughput_report import Result, report, summary, tables
from evals.timeline import Timeline
from tests.helpers.timed_engine import TimedEngine

SETTINGS = {
    "model": "m",
    "draft": "d",
    "device": "cpu",
    "dtype": "float32",
    "data": "own",
    "max_tokens": 32,
    "ignore_eos": False,
}


def requests(count: int, max_tokens: int = 32) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [
        Request(request_id=str(n), prompt_token_ids=(n, 2 * n, 7), params=params)
        for n in range(count)
    ]


def run(
    plan: Plan, engine: TimedEngine | None = None, count: int = 40
) -> tuple[list[Point], Timeline]:
    engine = engine or TimedEngine()
    timeline = Timeline(engine.clock, engine.clock())
    timeline.lap("load")
    return measure(engine, requests(count), plan, timeline), timeline


def test_passes_alternate_and_warm_up_is_outside() -> None:
    engine = TimedEngine()
    points, timeline = run(Plan(max_num_seqs=(2,), pairs=3, num_prompts=6), engine)
    names = [w.name for w in timeline.windows if w.name in ("warm-up", "drafted", "plain")]
    assert names == ["warm-up", "drafted", "plain", "plain", "drafted", "drafted", "plain"]
    warm = [(drafted, width) for _, drafted, width in engine.seen[:6]]
    assert warm == [(True, 1), (False, 1), (True, 2), (True, 2), (False, 2), (False, 2)]
    assert points[0].requests == 6
    assert all(p.start >= timeline.windows[1].end for p in points[0].drafted)


def test_warm_up_leaves_no_size_for_the_passes_to_meet_first() -> None:
    # graphs were captured in the first measured pass, at the sizes to which its batch shrank
    engine = TimedEngine()
    run(Plan(max_num_seqs=(3, 12), pairs=1), engine)
    sizes = list(dict.fromkeys(width for _, _, width in engine.seen))
    assert sizes == [1, 2, 3, 4, 8, 12]
    for size in range(1, 13):  # the engine pads to a captured size of up to twice the batch
        assert any(size <= captured <= 2 * size for captured in sizes)


def test_batch_sizes_take_turns() -> None:
    engine = TimedEngine()
    told: list[str] = []
    plan = Plan(max_num_seqs=(1, 4), pairs=2, num_prompts=8)
    timeline = Timeline(engine.clock, engine.clock())
    measure(engine, requests(8), plan, timeline, told.append)
    assert [text.rpartition(",")[0] for text in told] == [
        "1 at once, drafted",
        "1 at once, plain",
        "4 at once, drafted",
        "4 at once, plain",
        "4 at once, plain",
        "4 at once, drafted",
        "1 at once, plain",
        "1 at once, drafted",
    ]


def test_windows_make_up_the_wall_time() -> None:
    points, timeline = run(Plan(max_num_seqs=(1, 4)))
    totals = timeline.totals()
    assert sum(totals.values()) == pytest.approx(timeline.windows[-1].end - timeline.start)
    for p in [*points[1].drafted, *points[1].plain]:
        assert [w.name for w in p.windows] == ["ramp", "steady", "tail"]
        assert sum(w.seconds for w in p.windows) == pytest.approx(p.end - p.start)
        assert sum(p.seconds.values()) == pytest.approx(p.end - p.start)
        assert p.seconds["outside"] == pytest.approx(0.0, abs=1e-9)
    assert points[0].plain[0].seconds["draft"] == 0.0


def test_numbers_by_hand() -> None:
    # one request of 13 tokens, alone: prefill, then 12 tokens in rounds of 3
    engine = TimedEngine()
    one = [Request(request_id="a", prompt_token_ids=(9,), params=SamplingParams(max_tokens=32))]
    assert len(engine.answer(one[0])) == 13
    made = run_pass(engine, one, speculate=True, max_num_seqs=1, clock=engine.clock)
    # the first step prefills and decodes: 4 ms; each of 4 rounds is 1 + 3.5 ms; host 0.5 ms
    wall = 0.004 + 4 * (0.001 + 0.0035 + 0.0005)
    assert made.end - made.start == pytest.approx(wall)
    assert made.speed == pytest.approx(13 / wall)
    assert made.done[0].rounds == (Round(4, 2, 3),) * 4
    plain = run_pass(engine, one, speculate=False, max_num_seqs=1, clock=engine.clock)
    assert plain.end - plain.start == pytest.approx(0.004 + 12 * 0.0045)
    assert plain.mean_in_flight == pytest.approx(1 - 0.0005 / (plain.end - plain.start))


def test_pairs_agree_and_the_crossover_is_found() -> None:
    points, _ = run(Plan(max_num_seqs=(1, 2, 4, 8, 16)), count=64)
    for point in points:
        assert [pair.equal_outputs for pair in point.pairs] == [point.requests] * 2
        assert point.speedup is not None
        assert point.speedup.least == pytest.approx(point.speedup.most)
    gains = [p.speedup.mean for p in points if p.speedup is not None]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.9
    assert gains[-1] < 1
    found = crossover(points)
    last = max(p.max_num_seqs for p, gain in zip(points, gains, strict=True) if gain >= 1)
    assert found.batch is not None
    assert last < found.batch < 2 * last
    assert f"between {last} and {2 * last}" in found.verdict


def test_crossover_verdicts() -> None:
    points, _ = run(Plan(max_num_seqs=(1, 2)))
    assert crossover(points).batch is None
    assert "pays at the measured" in crossover(points).verdict
    slow = TimedEngine(accept=0)
    points, _ = run(Plan(max_num_seqs=(1, 2)), slow)
    assert "slower at every measured" in crossover(points).verdict
    points, _ = run(Plan(max_num_seqs=(1,), drafted=False))
    assert crossover(points).verdict.startswith("no drafter")
    assert points[0].drafted == ()
    assert len(points[0].plain) == 2


def test_a_drifting_machine_favours_neither_mode() -> None:
    # every step takes 1 % longer than the one before; equal modes must come out about equal
    engine = TimedEngine(accept=0)
    scale = [1.0]

    def costs(phase: str, running: int) -> float:
        scale[0] *= 1.001
        return {"draft": 0.0, "host": 0.0}.get(phase, 0.004) * scale[0]

    engine.costs = costs
    points, _ = run(Plan(max_num_seqs=(1,), pairs=2, num_prompts=8), engine)
    spread = points[0].speedup
    assert spread is not None
    assert spread.least < 1 < spread.most
    assert spread.mean == pytest.approx(1.0, abs=0.02)


def test_steady_speed_leaves_ramp_and_tail_out() -> None:
    points, _ = run(Plan(max_num_seqs=(8,)))
    steady = steady_speed_of(points[0].plain)
    assert steady is not None
    assert steady > speed_of(points[0].plain)
    few, _ = run(Plan(max_num_seqs=(8,), num_prompts=4))
    assert steady_speed_of(few[0].plain) is None
    assert [w.name for w in few[0].plain[0].windows] == ["run"]


class Lying(TimedEngine):
    """Changes what it completed."""

    def run(
        self, requests: Iterable[Request], **settings: object
    ) -> Iterator[Completion | RequestFailure]:
        for done in super().run(requests, **settings):  # type: ignore[arg-type]
            assert isinstance(done, Completion)
            yield self.lie(done)

    def lie(self, done: Completion) -> Completion:
        raise NotImplementedError


def test_tokens_that_are_not_timed_are_caught() -> None:
    class Engine(Lying):
        def lie(self, done: Completion) -> Completion:
            return replace(done, token_ids=(*done.token_ids, 97))

    engine = Engine()
    with pytest.raises(IdentityError, match="timed of"):
        run_pass(engine, requests(3), speculate=True, max_num_seqs=2, clock=engine.clock)


def test_rounds_that_the_engine_did_not_count_are_caught() -> None:
    class Engine(Lying):
        def lie(self, done: Completion) -> Completion:
            self.stats.rounds += 1
            return done

    engine = Engine()
    with pytest.raises(IdentityError, match="rounds"):
        run_pass(engine, requests(3), speculate=True, max_num_seqs=2, clock=engine.clock)


def test_phases_longer_than_the_wall_are_caught() -> None:
    class Engine(Lying):
        def lie(self, done: Completion) -> Completion:
            self.stats.seconds["verify"] += 1.0
            return done

    engine = Engine()
    with pytest.raises(IdentityError, match="phases exceed"):
        run_pass(engine, requests(3), speculate=True, max_num_seqs=2, clock=engine.clock)


def test_a_failed_request_ends_the_run() -> None:
    bad = Request(request_id="bad", prompt_token_ids=tuple(b"FAIL"), params=SamplingParams())
    with pytest.raises(DSparkError, match="request bad failed"):
        run_pass(TimedEngine(), [bad], speculate=True, max_num_seqs=1)


def test_spread_is_geometric() -> None:
    found = Spread.of([0.5, 2.0])
    assert (found.mean, found.least, found.most) == (pytest.approx(1.0), 0.5, 2.0)


@pytest.mark.parametrize("drafted", [True, False])
def test_reports(drafted: bool) -> None:
    points, timeline = run(Plan(max_num_seqs=(1, 2), drafted=drafted))
    result = Result(
        points=tuple(points),
        crossover=crossover(points),
        settings=SETTINGS if drafted else {**SETTINGS, "draft": None},
        windows=timeline.totals(),
        warnings=("careful",),
    )
    body = summary(result)
    first = body["points"][0]["drafted" if drafted else "plain"]
    mine = points[0].drafted or points[0].plain
    assert first["tokens_per_second"] == pytest.approx(speed_of(mine), rel=1e-5)
    speed, detail = tables(body).split("\n\n")
    for text in (speed, detail):
        lines = text.splitlines()
        assert len(lines) == 4
        assert len({len(line) for line in lines}) == 1
    made = report(result, {})
    assert [row["max_num_seqs"] for row in made.matrix] == ([1, 1, 2, 2] if drafted else [1, 2])
    ids = [(row["max_num_seqs"], row["mode"], row["pass"], row["id"]) for row in made.per_request]
    assert len(set(ids)) == len(ids) == (2 if drafted else 1) * 2 * 16
    assert [row["index"] for row in made.per_request] == list(range(len(ids)))
    if drafted:
        found = first["acceptance"]
        assert sum(found["histogram_of_committed"]) == found["rounds"]
        out = sum(p["output_tokens"] for p in first["passes"])
        assert found["committed"] == out - 2 * 8  # 2 passes of 8 requests, a first token each
