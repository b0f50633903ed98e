"""Placeholders filled from files the user has; what stays open is named."""

import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from evals.speed_bench.layouts import SpeedBench, load
from evals.speed_bench.placeholders import SOURCES, source_of
from evals.speed_bench.prepare import Given, as_record, prepare
from tests.helpers.speed_bench import ROWS, Row, placeholder, write_lines

CARD = "https://huggingface.co/datasets/"


def published(tmp_path: Path) -> SpeedBench:
    """Rows of every source that can be filled, and two that cannot."""
    rows = [
        ROWS[0],
        placeholder(20, CARD + "cais/hle", "h1"),
        placeholder(21, CARD + "abisee/cnn_dailymail", "c1", "Sum up:\n{article}"),
        placeholder(
            22,
            CARD + "livecodebench/code_generation_lite",
            "l1",
            "Solve {question} from\n{starter_code} {as it is}",
        ),
        placeholder(23, CARD + "deepmind/code_contests", "p1", "Do: {question}"),
        placeholder(24, "https://x/mtbench101/mt-bench-101/x.jsonl", "mt_1"),
        placeholder(
            25, CARD + "Helsinki-NLP/opus-100", "opus_de-en_1", "Into English: {question[de]}"
        ),
        placeholder(26, CARD + "TIGER-Lab/MMLU-Pro", "m(3,4)"),
        placeholder(27, "elsewhere", "z"),
    ]
    return load(write_lines(tmp_path / "qualitative.jsonl", rows))


def given(tmp_path: Path) -> list[Given]:
    files: dict[str, list[Row]] = {
        "hle": [{"id": "h0", "question": "no"}, {"id": "h1", "question": "How far {x}?"}],
        "cnn-dailymail": [{"id": "c1", "article": "It {rained} \\1."}],
        "livecodebench": [
            {"question_id": "l1", "question_content": "sum", "starter_code": "def f():"}
        ],
        "code-contests": [{"name": "p1", "description": "sort"}],
        "mt-bench-101": [
            {"history": []},
            {"history": [{"user": "hi", "bot": "yo"}, {"user": "bye", "bot": "."}]},
        ],
        "opus-100:de-en": [{"translation": {}}, {"translation": {"de": "Tag", "en": "day"}}],
    }
    made = []
    for name, rows in files.items():
        path = write_lines(tmp_path / "src" / (name.replace(":", "-") + ".jsonl"), rows)
        made.append(Given.parse(f"{name}={path}"))
    return made


def test_every_known_source_is_filled(tmp_path: Path) -> None:
    made = prepare(published(tmp_path), given(tmp_path))
    assert {row.id: row.turns for row in made.rows} == {
        "id-0": tuple(ROWS[0]["turns"]),
        "id-20": ("How far {x}?",),
        "id-21": ("Sum up:\nIt {rained} \\1.",),
        "id-22": ("Solve sum from\ndef f(): {as it is}",),
        "id-23": ("Do: sort",),
        "id-24": ("hi", "bye"),
        "id-25": ("Into English: Tag",),
    }
    assert {why: [row.id for row in rows] for why, rows in made.missing.items()} == {
        "mmlu-pro: only the official script builds its rows": ["id-26"],
        "the source 'elsewhere' is not known": ["id-27"],
    }
    assert made.subset == "qualitative-no-elsewhere-mmlu-pro-7of9"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    made = prepare(published(tmp_path), [])
    assert [row.id for row in made.rows] == ["id-0"]
    whys = list(made.missing)
    assert "hle: no --source hle=FILE" in whys
    assert made.subset == "qualitative-clean-1of9"
    other = write_lines(tmp_path / "hle.jsonl", [{"id": "other", "question": "q"}])
    made = prepare(published(tmp_path), [Given.parse(f"hle={other}")])
    assert "hle: the given file lacks the row's record" in made.missing


def test_rows_built_elsewhere_are_taken_by_their_id(tmp_path: Path) -> None:
    built = [dict(placeholder(26, "x", "y"), turns=["one", "two"])]
    other = write_lines(tmp_path / "built" / "qualitative.jsonl", built)
    made = prepare(published(tmp_path), [], [other])
    assert {row.id: row.turns for row in made.rows}["id-26"] == ("one", "two")


def test_what_was_written_is_read_with_its_name(tmp_path: Path) -> None:
    made = prepare(published(tmp_path), given(tmp_path))
    lines = [as_record(row, made.subset) for row in made.rows]
    data = load(write_lines(tmp_path / "out" / "qualitative.jsonl", lines))
    assert data.subset == made.subset
    assert not data.placeholders
    assert [row.turns for row in data.conversations] == [row.turns for row in made.rows]


def test_throughput_rows_of_hle_are_not_guessed(tmp_path: Path) -> None:
    rows = [placeholder(1, "cais/hle", "h1", category="mixed")]
    data = load(write_lines(tmp_path / "throughput_1k.jsonl", rows))
    made = prepare(data, given(tmp_path))
    assert list(made.missing) == ["hle: only the official script builds its rows"]


@pytest.mark.parametrize("text", ["hle", "nothing=x", "mmlu-pro=x", "hle=missing.jsonl"])
def test_bad_sources_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Given.parse(text)


def test_sources_are_told_apart() -> None:
    for source in SOURCES:
        assert source_of(CARD + source.mark + "/raw/x.json") is source
    assert source_of("own") is None


def test_a_json_array_is_a_source_too(tmp_path: Path) -> None:
    path = tmp_path / "hle.json"
    path.write_text(json.dumps([{"id": "h1", "question": "q"}]))
    made = prepare(published(tmp_path), [Given.parse(f"hle={path}")])
    assert made.filled == {"hle": 1}
