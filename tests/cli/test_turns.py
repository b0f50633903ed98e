"""Rows of several turns: each reply is made, fed back, and part of the one output line."""

import json
import signal
import time
from typing import Any

import pytest

from dspark_cli.job import Job
from engine.request import Request, SamplingParams
from tests.cli import fake
from tests.cli.conftest import Bench
from tests.cli.test_crash import Process

FIELDS = ["text", "token_ids", "finish_reason", "stop_reason", "usage", "spec"]
MIXED = [
    {"id": "two", "turns": ["a", "b"]},
    {"id": "one", "prompt": "alone"},
    {"id": "three", "turns": ["c", "d", "e"]},
    {"id": "single", "turns": ["f"]},
    *({"id": f"r{at}", "prompt": f"prompt {at}"} for at in range(6)),
    {"id": "last", "turns": ["g", "h"]},
]


def expected(row_id: str, asked: list[str], sample: int = 0, **params: Any) -> list[str]:
    """The replies, turn by turn, from the fake model itself."""
    tokenizer, replies, messages = fake.FakeTokenizer(), [], []
    for turn, text in enumerate(asked, 1):
        messages.append({"role": "user", "content": text})
        request = Request(
            request_id=row_id if turn == 1 else f"{row_id}\0turn {turn}",
            prompt_token_ids=tuple(tokenizer.encode_chat(messages)),
            params=SamplingParams(**params),
            sample_index=sample,
        )
        replies.append(tokenizer.decode(fake.output_of(request)[0]))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def replies(row: dict[str, Any]) -> list[str]:
    return [turn["text"] for turn in row["turns"]]


@pytest.mark.parametrize("seqs", ["1", "4"])
def test_turns_among_single_rows_come_in_input_order(bench: Bench, seqs: str) -> None:
    bench.write(MIXED)
    bench.generate("--max-num-seqs", seqs)
    rows = bench.rows()
    assert [row["id"] for row in rows] == [row["id"] for row in MIXED]
    for given, row in zip(MIXED, rows, strict=True):
        turns: Any = given.get("turns", ())
        assert ("turns" in row) == (len(turns) > 1)
        if len(turns) < 2:
            continue
        assert replies(row) == expected(row["id"], turns)
        assert all(list(turn) == FIELDS for turn in row["turns"])
        assert {name: row[name] for name in FIELDS} == row["turns"][-1]
        prompts = [turn["usage"]["prompt_tokens"] for turn in row["turns"]]
        assert prompts == sorted(set(prompts))


def test_only_conversations_and_more_of_them_than_the_batch_holds(bench: Bench) -> None:
    bench.write([{"turns": [f"{at}", "and?", "so?"]} for at in range(7)])
    whole = []
    for seqs in ("1", "3"):
        bench.generate("--max-num-seqs", seqs, "--temperature", "0.8", "--overwrite")
        whole.append(bench.output.read_bytes())
    assert whole[0] == whole[1]
    assert len(bench.rows()) == 7


def test_samples_of_a_conversation_go_their_own_ways(bench: Bench) -> None:
    bench.write([{"id": "x", "turns": ["a", "b"]}, {"id": "y", "prompt": "a"}])
    bench.generate("--n", "2", "--temperature", "1")
    rows = bench.rows()
    assert [(row["id"], row["sample"]) for row in rows] == [("x", 0), ("x", 1), ("y", 0), ("y", 1)]
    for row in rows[:2]:
        want = expected("x", ["a", "b"], row["sample"], temperature=1.0)
        assert replies(row) == want
    assert rows[0]["turns"] != rows[1]["turns"]


def test_stdout_waits_for_the_last_turn(bench: Bench) -> None:
    bench.write(MIXED)
    out = bench.generate("-o", "-").out
    assert [json.loads(line)["id"] for line in out.splitlines()] == [row["id"] for row in MIXED]


def test_a_turn_that_fails_fails_the_row_by_name(bench: Bench) -> None:
    rows = [
        {"id": "long", "turns": ["a", "x" * 300, "c"]},
        {"id": "oom", "turns": ["a", "b", "FAIL_oom"]},
        {"id": "first", "turns": ["TEMPLATE_RAISES", "b"]},
        {"id": "ok", "turns": ["a", "b"]},
    ]
    bench.write(rows)
    bench.generate(code=3)
    assert [row["id"] for row in bench.rows()] == ["ok"]
    errors = {e["id"]: (e["class"], e["message"].split(":")[0]) for e in bench.errors()}
    assert errors == {
        "long": ("too_long", "turn 2 of 3"),
        "oom": ("oom", "turn 3 of 3"),
        "first": ("schema", "turn 1 of 2"),
    }


def test_too_long_later_turns_get_another_look_when_replies_may_be_shorter(bench: Bench) -> None:
    bench.write([{"id": "a", "turns": ["x" * 20, "y" * 20], "ignore_eos": True}])
    bench.generate("--max-tokens", "140", code=3)
    bench.generate("--max-tokens", "140", code=3)
    assert fake.FakeEngine.loads == 1
    bench.generate("--max-tokens", "20")
    assert len(bench.rows()[0]["turns"]) == 2


def test_a_raised_limit_redoes_rows_with_any_turn_cut(bench: Bench) -> None:
    bench.write([{"id": at, "turns": [f"{at}", "b"]} for at in range(30)])
    bench.generate("--max-tokens", "20")
    before = bench.rows()
    ends = [tuple(turn["finish_reason"] for turn in row["turns"]) for row in before]
    assert ("length", "stop") in ends
    assert ("stop", "stop") in ends
    bench.generate("--max-tokens", "100")
    again = bench.rows()
    for old, new, how in zip(before, again, ends, strict=True):
        assert (new == old) == (how == ("stop", "stop"))
    bench.generate("--max-tokens", "100", "--overwrite")
    assert [replies(row) for row in bench.rows()] == [replies(row) for row in again]


def test_kept_rows_are_not_asked_again_and_edited_turns_are(bench: Bench) -> None:
    bench.write(MIXED)
    bench.generate()
    bench.generate()
    assert fake.FakeEngine.loads == 1
    bench.write([{**MIXED[0], "turns": ["a", "other"]}, *MIXED[1:]])
    bench.generate()
    assert replies(bench.rows()[0]) == expected("two", ["a", "other"])
    assert bench.journal.read_bytes().count(b'"id": "three"') == 1


def test_kill_9_between_turns_redoes_the_row(bench: Bench) -> None:
    rows = [{"id": f"r{at}", "turns": ["a", f"b{at}", "c"]} for at in range(20)]
    bench.write(rows)
    bench.generate("--draft", "none", "--temperature", "0.8")
    clean = bench.output.read_bytes()
    bench.output.unlink()
    bench.journal.unlink()
    for _ in range(2):
        args = ("--max-num-seqs", "2", "--temperature", "0.8")
        process = Process(bench, *args, delay=0.05)
        before = bench.journal.read_bytes().count(b"\n") if bench.journal.exists() else 0
        process.wait_for_rows(max(before, 1))
        process.popen.kill()
        process.end()
    bench.generate("--draft", "none", "--temperature", "0.8")
    assert bench.output.read_bytes() == clean
    records = [json.loads(line) for line in bench.journal.read_bytes().splitlines()]
    done = [record["row"]["id"] for record in records if record["type"] == "row"]
    assert sorted(done) == sorted(row["id"] for row in rows)


def test_draining_starts_no_further_turn(bench: Bench) -> None:
    bench.write([{"id": "a", "turns": ["m"] * 8}, {"id": "b", "prompt": "x"}])
    process = Process(bench, "--max-tokens", "1", delay=0.6)  # a turn is a step
    process.wait_for_rows(1)  # b ends while a is at one of its first turns
    process.popen.send_signal(signal.SIGINT)
    started = time.monotonic()
    code, text = process.end()
    assert code == 130, text
    assert time.monotonic() - started < 3, "it went on with further turns"
    assert "unfinished" not in text
    records = [json.loads(line) for line in bench.journal.read_bytes().splitlines()]
    assert [r["row"]["id"] for r in records if r["type"] == "row"] == ["b"]
    assert not bench.output.exists()


def test_drained_conversations_run_in_the_next_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(MIXED)
    settle = Job._settle
    asked: list[str] = []

    def drain(self: Job, result: Any) -> None:
        settle(self, result)
        asked.append(result.request.request_id)
        self._interrupts.draining = True

    with monkeypatch.context() as patch:
        patch.setattr(Job, "_settle", drain)
        bench.generate("--max-num-seqs", "3", code=130)
    assert not [name for name in asked if "\0" in name]
    bench.generate("--max-num-seqs", "3")
    assert [row["id"] for row in bench.rows()] == [row["id"] for row in MIXED]
    assert replies(bench.rows()[2]) == expected("three", ["c", "d", "e"])


def test_an_engine_that_ends_early_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fake.FakeEngine.run

    def hasty(self: fake.FakeEngine, requests: Any) -> Any:
        yield from whole(self, [next(iter(requests))])

    monkeypatch.setattr(fake.FakeEngine, "run", hasty)
    bench.write([{"id": "x", "turns": ["a", "b"]}])
    assert "1 rows unfinished, 'x' first" in bench.generate(code=1).err


def test_dry_run_counts_conversations(bench: Bench) -> None:
    bench.write([{"turns": ["a", "b"]}, {"turns": ["a"]}])
    text = bench.generate("--dry-run", "--max-tokens", "10").out.decode()
    assert "good            2" in text
    assert "output tokens   30 at most" in text
    assert "conversations   1 " in text


def test_metrics_count_lines_not_turns(bench: Bench) -> None:
    bench.write(MIXED)
    metrics = bench.folder / "m.json"
    bench.generate("--metrics-json", str(metrics))
    body = json.loads(metrics.read_text())
    assert sum(body["rows"]["by_finish_reason"].values()) == body["rows"]["done"] == len(MIXED)


def test_compare_plain_asks_every_turn_again(bench: Bench) -> None:
    bench.write(MIXED)
    turns = sum(len(row.get("turns", [""])) for row in MIXED)
    assert f"{turns} of {turns} outputs are equal" in bench.generate("--compare-plain").err
