"""300 malformed lines among good ones: each gets its class, none stops the run."""

import random
from collections import Counter

from tests.cli.conftest import Bench
from tests.cli.malformed import KINDS, PER_KIND


def test_300_malformed_lines_of_30_kinds(bench: Bench) -> None:
    assert len(KINDS) == 30
    lines: list[tuple[str, bytes]] = [
        (kind.name, kind.line(at)) for kind in KINDS for at in range(PER_KIND)
    ]
    assert len(lines) == 300
    lines += [("good", b'{"prompt": "good row %d"}' % at) for at in range(300)]
    lines += [("duplicate", b'{"id": "twice", "prompt": "%d"}' % at) for at in range(11)]
    random.Random(0).shuffle(lines)
    bench.input.write_bytes(b"".join(line + b"\n" for _, line in lines))

    bench.generate(code=3)

    errors = {error["index"]: error for error in bench.errors()}
    expected = {kind.name: kind.expected for kind in KINDS}
    wrong = []
    seen: Counter[str] = Counter()
    for index, (name, line) in enumerate(lines):
        got = errors[index]["class"] if index in errors else "good"
        want = expected.get(name, "good")
        if name == "duplicate":
            seen[name] += 1
            want = "good" if seen[name] == 1 else "duplicate_id"
        if got != want:
            wrong.append((name, line[:80], want, errors.get(index)))
    assert wrong == []
    assert len(bench.rows()) == 301
    assert len(errors) == 310


def test_every_error_says_what_where_and_what_to_do(bench: Bench) -> None:
    bench.input.write_bytes(b"".join(kind.line(0) + b"\n" for kind in KINDS))
    bench.generate(code=3)
    for error in bench.errors():
        assert list(error) == [
            "id",
            "index",
            "line",
            "class",
            "message",
            "hint",
            "retryable",
        ]
        assert error["line"] == error["index"] + 1
        assert error["message"]
        assert error["hint"]
        assert error["retryable"] is False
        assert len(error["message"]) < 300


def test_only_malformed_lines_end_with_3_and_an_empty_output(bench: Bench) -> None:
    bench.input.write_bytes(b"{\n")
    bench.generate(code=3)
    assert bench.output.read_bytes() == b""


def test_bad_rows_are_written_to_the_journal_once(bench: Bench) -> None:
    bench.input.write_bytes(b"".join(kind.line(0) + b"\n" for kind in KINDS))
    bench.generate(code=3)
    journal = bench.journal.read_bytes()
    errors = bench.errors_file.read_bytes()
    bench.generate(code=3)
    assert bench.journal.read_bytes() == journal
    assert bench.errors_file.read_bytes() == errors
