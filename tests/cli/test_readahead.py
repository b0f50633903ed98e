"""Rows are read and tokenised beside the loop: slow ones hold up nobody, and every thread ends."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_cli import backend, readahead
from dspark_cli.patient import patient
from dspark_cli.readahead import NOT_YET, ReadAhead
from dspark_cli.reader import Rows, open_sources
from tests.cli import fake
from tests.cli.conftest import Bench
from tests.cli.test_crash import Process

LONG = 20.0
"""Seconds after which a test gives up; nothing waits for it when all is well."""


def our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dspark-")]


def ahead(items: Iterator[Any], size: Callable[[Any], int] = lambda _: 1) -> ReadAhead[Any]:
    return ReadAhead(items, size, threading.Event())


def take_all(made: ReadAhead[Any]) -> Iterator[Any]:
    while True:
        try:
            yield made.get(wait=True)
        except StopIteration:
            return


def test_items_come_in_order_and_the_error_after_them() -> None:
    def items() -> Iterator[int]:
        yield from range(2000)
        raise KeyError("the disk")

    made = ahead(items())
    got: list[int] = []
    with pytest.raises(KeyError, match="the disk"):
        got.extend(take_all(made))
    assert got == list(range(2000))
    made.close()
    assert our_threads() == []


@pytest.mark.parametrize("bound", ["items", "bytes"])
def test_it_stays_within_its_bounds(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "ITEMS_AHEAD", 5 if bound == "items" else 1000)
    monkeypatch.setattr(readahead, "BYTES_AHEAD", 1000 if bound == "items" else 5)
    begun: list[int] = []

    def items() -> Iterator[int]:
        for n in range(50):
            begun.append(n)
            yield n

    made = ahead(items())
    for n in range(50):
        deadline = time.monotonic() + LONG
        while len(begun) < min(n + 6, 50) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.003)
        assert len(begun) <= n + 6  # five made, one in hand
        assert made.get(wait=False) == n
    made.close()


def test_an_item_larger_than_the_bound_still_comes() -> None:
    made = ahead(iter([1, 2]), lambda _: 1 << 40)
    assert list(take_all(made)) == [1, 2]


def test_what_is_not_there_yet_is_not_waited_for() -> None:
    go = threading.Event()

    def items() -> Iterator[int]:
        go.wait(LONG)
        yield 7

    made = ahead(items())
    assert made.get(wait=False) is NOT_YET
    go.set()
    assert made.get(wait=True) == 7
    made.close()


def test_closing_ends_a_thread_that_waits_for_room_or_for_a_pipe() -> None:
    made = ahead(iter(range(10**9)))
    made.get(wait=True)
    made.close()
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as raw, os.fdopen(write_end, "wb") as silent:
        given_up = threading.Event()
        lines = ReadAhead(iter(patient(raw, given_up)), len, given_up)
        assert lines.get(wait=False) is NOT_YET
        silent.write(b"one\n")
        silent.flush()
        assert lines.get(wait=True) == b"one\n"
        begin = time.monotonic()
        lines.close()
        assert time.monotonic() - begin < 5
    assert our_threads() == []


def test_a_named_pipe_nobody_writes_to_can_be_given_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows")
    rows = Rows(open_sources(str(tmp_path / "rows")))
    made = ReadAhead(iter(rows), lambda _: 1, rows.given_up)
    assert made.get(wait=False) is NOT_YET
    made.close()
    assert our_threads() == []


def wait_for(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if done():
            return True
        time.sleep(0.005)
    return False


def test_rows_finish_while_stdin_is_silent(bench: Bench) -> None:
    """A free slot waited for the next row of a slow pipe, and the rows that ran waited with it."""
    process = Process(bench, "--max-num-seqs", "8", stdin=subprocess.PIPE)
    stdin = process.popen.stdin
    assert stdin is not None
    for number in range(3):
        stdin.write(json.dumps({"id": number, "prompt": f"row {number}"}).encode() + b"\n")
        stdin.flush()
        process.wait_for_rows(number + 1)  # this row's record, behind the headers
        assert wait_for(lambda n=number: done_rows(bench) == list(range(n + 1)))  # type: ignore[misc]
    stdin.close()
    process.popen.stdin = None
    code, text = process.end()
    assert code == 0, text
    assert [row["id"] for row in bench.rows()] == [0, 1, 2]


def done_rows(bench: Bench) -> list[int]:
    lines = bench.journal.read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    return [record["row"]["id"] for record in records if record["type"] == "row"]


class Gate:
    """Holds a tokenizer back until something else has happened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.in_time: list[bool] = []
        self.threads: set[str] = set()

    def wait(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.in_time.append(self.open.wait(LONG))


@pytest.fixture
def gate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Prompts with WAIT are tokenised only after the row `first` has ended."""
    gate = Gate()

    class Slow(fake.FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if "WAIT" in text:
                gate.wait()
            return super().encode(text, add_special_tokens)

    real = fake.FakeEngine._finish

    def finish(self: fake.FakeEngine, request: Any) -> Any:
        if request.request_id == "first":
            gate.open.set()
        return real(self, request)

    monkeypatch.setattr(backend, "load_tokenizer", lambda _folder: Slow())
    monkeypatch.setattr(fake.FakeEngine, "_finish", finish)
    return gate


def test_a_slow_tokenizer_does_not_hold_up_rows_that_run(bench: Bench, gate: Gate) -> None:
    rows = [{"id": "first", "prompt": "a"}, {"id": "slow", "prompt": "WAIT"}]
    bench.write([*rows, {"id": "last", "prompt": "b"}])
    bench.generate()
    assert gate.in_time == [True]
    assert [row["id"] for row in bench.rows()] == ["first", "slow", "last"]
    assert our_threads() == []


def test_nor_does_one_that_is_slow_with_a_later_turn(bench: Bench, gate: Gate) -> None:
    """`first` takes 40 steps, the first turn of the other one ends before it."""
    talk = {"id": "talk", "turns": ["q", "WAIT"], "max_tokens": 8}
    first = {"id": "first", "prompt": "a", "ignore_eos": True, "max_tokens": 320}
    bench.write([first, talk])
    bench.generate("--max-num-seqs", "2")
    assert gate.in_time == [True]
    assert "MainThread" not in gate.threads
    assert [len(row.get("turns", [1])) for row in bench.rows()] == [1, 2]
    assert our_threads() == []


def test_rows_found_in_the_journal_are_not_tokenised_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write([{"id": n, "prompt": f"p{n}"} for n in range(30)])
    bench.generate("--limit", "20")
    seen: list[str] = []

    class Counting(fake.FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            seen.append(text)
            return super().encode(text, add_special_tokens)

    monkeypatch.setattr(backend, "load_tokenizer", lambda _folder: Counting())
    bench.generate()
    assert seen == [f"p{n}" for n in range(20, 30)]
    assert len(bench.rows()) == 30


def test_rows_that_cannot_be_tokenised_cost_themselves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(fake.FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if "BAD" in text:
                raise OverflowError("too much")
            return super().encode(text, add_special_tokens)

    monkeypatch.setattr(backend, "load_tokenizer", lambda _folder: Picky())
    bench.write([{"id": "a", "prompt": "a"}, {"id": "b", "prompt": "BAD"}, {"id": "c", "n": 0}])
    bench.generate(code=3)
    assert [row["id"] for row in bench.rows()] == ["a"]
    assert [(row["id"], row["class"]) for row in bench.errors()] == [
        ("b", "schema"),
        ("c", "schema"),
    ]
    assert our_threads() == []


@pytest.mark.parametrize("broken", ["engine", "input"])
def test_a_run_that_breaks_leaves_no_thread_and_ends_at_once(bench: Bench, broken: str) -> None:
    """A thread inside a read of stdin turned exit code 1 into an abort of the interpreter."""
    process = Process(bench, "--max-num-seqs", "2", stdin=subprocess.PIPE)
    stdin = process.popen.stdin
    assert stdin is not None
    text = "RAISE" if broken == "engine" else "fine"
    stdin.write(json.dumps({"id": 1, "prompt": text}).encode() + b"\n")
    stdin.flush()
    if broken == "input":
        assert wait_for(lambda: bench.journal.exists() and done_rows(bench) == [1])
        process.popen.terminate()
    # stdin stays open all the while
    assert process.popen.wait(timeout=LONG) == (1 if broken == "engine" else 130)
    assert process.popen.stderr is not None
    err = process.popen.stderr.read().decode()
    assert "Fatal Python error" not in err
    assert ("the engine broke" in err) == (broken == "engine")
    stdin.close()
    process.popen.stderr.close()


def test_a_limit_needs_no_further_row(bench: Bench) -> None:
    """Two rows of three were wanted, and a third had to come before the run could end."""
    process = Process(bench, "--limit", "2", stdin=subprocess.PIPE)
    stdin = process.popen.stdin
    assert stdin is not None
    for number in range(2):
        stdin.write(json.dumps({"id": number, "prompt": "x"}).encode() + b"\n")
    stdin.flush()
    assert process.popen.wait(timeout=LONG) == 0
    stdin.close()
    assert process.popen.stderr is not None
    process.popen.stderr.close()
    assert [row["id"] for row in bench.rows()] == [0, 1]
