"""Conversations through the engine: replies fed back, prefixes reused, nothing played twice."""

from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.request import Completion, RequestFailure, SamplingParams
from evals.metrics import check_completion, check_counters
from evals.speed_bench.layouts import Conversation, load
from evals.speed_bench.play import Player, PlaySettings, Turn, in_order
from evals.speed_bench.summary import Group, prefix_reuse
from tests.helpers.speed_bench import ROWS, write_lines
from tests.helpers.timed_engine import TimedEngine, default_costs

PARAMS = SamplingParams(max_tokens=40)


def conversations(tmp_path: Path, rows: list[dict[str, object]] = ROWS) -> tuple[Conversation, ...]:
    return load(write_lines(tmp_path / "qualitative.jsonl", rows)).conversations


def play(engine: TimedEngine, rows: tuple[Conversation, ...], **settings: object) -> list[Turn]:
    player = Player(engine, rows, PlaySettings(params=PARAMS, **settings))  # type: ignore[arg-type]
    return in_order(list(player.play()), rows)


def test_replies_are_fed_back(tmp_path: Path) -> None:
    rows = conversations(tmp_path)
    engine = TimedEngine()
    turns = play(engine, rows)
    assert [(t.conversation.id, t.turn) for t in turns] == [
        ("id-0", 0),
        ("id-0", 1),
        ("id-1", 0),
        ("id-2", 0),
        ("id-2", 1),
        ("id-2", 2),
        ("id-3", 0),
    ]
    third = turns[5].completion
    assert third is not None
    replies = [t.completion.text for t in turns[3:5] if t.completion is not None]
    assert engine.tokenizer.decode(list(third.request.prompt_token_ids)) == (
        f"user:What is 7 * 6?\nassistant:{replies[0]}\nuser:And 7 * 7?\n"
        f"assistant:{replies[1]}\nuser:And the sum?\nassistant:"
    )


@pytest.mark.parametrize("width", [1, 2, 8])
def test_replies_do_not_depend_on_the_batch(width: int, tmp_path: Path) -> None:
    rows = conversations(tmp_path)
    wide = play(TimedEngine(), rows, max_num_seqs=8)
    turns = play(TimedEngine(), rows, max_num_seqs=width)
    assert [t.completion and t.completion.token_ids for t in turns] == [
        t.completion and t.completion.token_ids for t in wide
    ]


def test_a_turn_starts_when_the_one_before_it_ends(tmp_path: Path) -> None:
    # one row at a time: a conversation is played to its end before the next begins
    engine = TimedEngine()
    play(engine, conversations(tmp_path), max_num_seqs=1)
    order = [request_id for request_id, _, _ in engine.seen]
    assert order == ["id-2/0", "id-2/1", "id-2/2", "id-0/0", "id-0/1", "id-1/0", "id-3/0"]


def test_a_turn_takes_the_row_that_the_one_before_it_leaves(tmp_path: Path) -> None:
    # turns that became ready after the last new conversation had begun waited for all others to end
    turns = play(TimedEngine(), conversations(tmp_path), max_num_seqs=8)
    ends: dict[tuple[str, int], float] = {}
    for turn in turns:
        assert turn.completion is not None
        timing = turn.completion.timing
        ends[turn.conversation.id, turn.turn] = timing.commits[-1][0]
        if turn.turn:
            waited = timing.admitted - ends[turn.conversation.id, turn.turn - 1]
            assert waited <= default_costs("host", 8) + 1e-9


def test_first_turns_only(tmp_path: Path) -> None:
    turns = play(TimedEngine(), conversations(tmp_path), first_turn_only=True)
    assert [t.turn for t in turns] == [0, 0, 0, 0]


def test_a_failed_turn_ends_its_conversation_alone(tmp_path: Path) -> None:
    rows = conversations(tmp_path, [dict(ROWS[2], turns=["a", "FAIL", "c"]), *ROWS[:2]])
    turns = play(TimedEngine(), rows)
    mine = [t for t in turns if t.conversation.id == "id-2"]
    assert [t.turn for t in mine] == [0, 1]
    assert isinstance(mine[1].result, RequestFailure)
    assert all(t.completion is not None for t in turns if t.conversation.id != "id-2")
    group = Group("all", tuple(turns)).as_json()
    assert group["errors"] == {"too_long": 1}


def test_a_template_that_refuses_is_that_conversations_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.errors import RequestError

    engine = TimedEngine()
    real = engine.tokenizer.encode_chat

    def encode(messages: list[dict[str, str]], *rest: object) -> list[int]:
        if "baker" in messages[0]["content"]:
            raise RequestError("schema", "no bakers")
        return real(messages, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.tokenizer, "encode_chat", encode)
    turns = play(engine, conversations(tmp_path))
    failed = [t for t in turns if t.completion is None]
    assert [(t.conversation.id, t.result.kind) for t in failed] == [  # type: ignore[union-attr]
        ("id-3", "schema")
    ]
    assert len(turns) == 7


def test_acceptance_per_conversation(tmp_path: Path) -> None:
    turns = play(TimedEngine(accept=2), conversations(tmp_path))
    group = Group("all", tuple(turns))
    by_id: dict[str, list[int]] = {}
    for turn in turns:
        assert turn.completion is not None
        for r in turn.completion.rounds:
            by_id.setdefault(turn.conversation.id, []).append(r.committed)
    means = [sum(counts) / len(counts) for counts in by_id.values()]
    assert group.length_per_conversation == pytest.approx(sum(means) / len(means))


@pytest.fixture(scope="module")
def demo() -> Engine:
    return Engine(EngineConfig(model="demo", draft="demo", device="cpu", threads=1, max_num_seqs=4))


def test_the_demo_pair_reuses_the_prefix_of_later_turns(demo: Engine, tmp_path: Path) -> None:
    # the text of a reply, encoded again, must give the tokens whose KV is there
    problem = "Boris has {} beads. Later Boris finds {} more beads. How many beads is that?"
    rows = [
        dict(ROWS[0], question_id=str(n), turns=[problem.format(n + 5, 7), problem.format(n, 9)])
        for n in range(3)
    ]
    read = conversations(tmp_path, rows)
    player = Player(demo, read, PlaySettings(params=SamplingParams(max_tokens=60)))
    before = _copy(demo)
    turns = in_order(list(player.play()), read)
    done = [t.completion for t in turns if isinstance(t.completion, Completion)]
    assert len(done) == 6
    for completion in done:
        check_completion(completion)
    check_counters(done, before, demo.stats)
    reuse = prefix_reuse(turns)
    assert reuse["later_turns"] == 3
    assert reuse["share"] > 0.5
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        a, b = first.completion, second.completion
        assert a is not None
        assert b is not None
        whole = (*a.request.prompt_token_ids, *a.token_ids)
        assert b.request.prompt_token_ids[: len(whole)] == whole


def _copy(engine: Engine) -> object:
    from dataclasses import replace

    return replace(engine.stats, seconds={})
