"""The journal survives being cut anywhere, and tells what it cannot read."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_cli.journal import FORMAT, Journal, row_key
from engine.errors import ConfigError
from tests.cli.conftest import Bench

HEADER = {"type": "header", "format": FORMAT, "run": {"a": 1}}


def error_record(name: str) -> dict[str, object]:
    key = row_key(name, 0, {"text": name}, {})
    return {"type": "error", "key": key, "data_key": "0", "error": {"class": "x", "id": name}}


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_resume_from_any_cut_gives_the_same_output(bench: Bench, data: st.DataObject) -> None:
    # verifiers#1564, bantzv2#511: a torn last line broke resuming, or left duplicate rows
    whole = bench.folder / "whole"
    if not whole.exists():
        bench.write([*({"prompt": f"p{at} \u2028", "n": 1 + at % 2} for at in range(6)), b"{"])
        bench.generate("--temperature", "1", code=3)
        whole.mkdir()
        for path in (bench.output, bench.errors_file, bench.journal):
            shutil.copy(path, whole)
    journal = (whole / bench.journal.name).read_bytes()
    cut = data.draw(st.integers(0, len(journal)))
    bench.journal.write_bytes(journal[:cut])
    bench.output.unlink(missing_ok=True)
    bench.errors_file.unlink(missing_ok=True)

    result = bench.generate("--temperature", "1", code=3)

    assert bench.output.read_bytes() == (whole / bench.output.name).read_bytes()
    assert bench.errors_file.read_bytes() == (whole / bench.errors_file.name).read_bytes()
    assert sorted(bench.journal.read_bytes().splitlines()) == sorted(journal.splitlines())
    torn = cut > 0 and not journal[:cut].endswith(b"\n")
    assert ("cut short" in result.err) == torn


def test_damaged_lines_in_the_middle_are_named_and_their_rows_run_again(bench: Bench) -> None:
    bench.write([{"id": f"r{at}", "prompt": f"p{at}"} for at in range(8)])
    bench.generate()
    output = bench.output.read_bytes()
    lines = bench.journal.read_bytes().splitlines(keepends=True)
    lines[3] = b"\0" * (len(lines[3]) - 1) + b"\n"
    lines[5] = lines[5][:40] + b"\n"
    bench.journal.write_bytes(b"".join(lines))
    result = bench.generate()
    assert "2 damaged lines in the journal: 4, 6" in result.err
    assert "2 lines in" in result.err
    assert bench.output.read_bytes() == output


def test_damaged_header_is_refused(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    bench.generate()
    lines = bench.journal.read_bytes().splitlines(keepends=True)
    bench.journal.write_bytes(b"{\n" + b"".join(lines[1:]))
    result = bench.generate(code=2)
    assert "not a journal" in result.err
    bench.generate("--overwrite")


def test_a_file_of_that_name_that_is_no_journal_is_not_touched(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    bench.journal.write_text("Dear diary")
    assert "not a journal" in bench.generate(code=2).err
    assert bench.journal.read_text() == "Dear diary"


def test_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text(json.dumps({**HEADER, "format": 99}) + "\n")
    with pytest.raises(ConfigError, match="format 99"):
        Journal(path)


def test_two_runs_cannot_write_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path), pytest.raises(ConfigError, match="another run"):
        Journal(path)
    Journal(path).close()


def test_last_record_of_a_row_counts(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Journal(path) as journal:
        journal.append(HEADER)
        first = journal.append(error_record("a"))
        second = journal.append(error_record("a"))
    assert first < second
    with Journal(path) as journal:
        entry = journal.find(str(error_record("a")["key"]))
        assert entry is not None
        assert entry.offset == second
        assert len(journal) == 1
        assert journal.header == {"a": 1}


def test_long_records_are_read_whole(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append(HEADER)
        record = error_record("a") | {"filler": "x" * 100_000}
        assert journal.read(journal.append(record)) == record


@given(
    st.text(max_size=5),
    st.integers(0, 3),
    st.text(max_size=5),
    st.sampled_from([0.0, 1.0]),
    st.text(max_size=5),
    st.integers(0, 3),
    st.text(max_size=5),
    st.sampled_from([0.0, 1.0]),
)
def test_key_is_equal_only_for_equal_requests(
    id_a: str, k_a: int, text_a: str, t_a: float, id_b: str, k_b: int, text_b: str, t_b: float
) -> None:
    a = row_key(id_a, k_a, {"text": text_a}, {"temperature": t_a, "max_tokens": 1})
    b = row_key(id_b, k_b, {"text": text_b}, {"max_tokens": 2, "temperature": t_b})
    assert (a == b) == ((id_a, k_a, text_a, t_a) == (id_b, k_b, text_b, t_b))
