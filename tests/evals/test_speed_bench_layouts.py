"""SPEED-Bench files: six layouts, one reading; placeholders never pass unseen."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from evals.speed_bench.layouts import Conversation, clean, load, narrow
from tests.helpers.speed_bench import (
    ROWS,
    as_messages,
    layouts,
    placeholder,
    write_lines,
)

TIERED = [
    dict(row, category=category, sub_category=sub)
    for row, (category, sub) in zip(
        ROWS,
        [
            ("low_entropy", "sorting"),
            ("mixed", "exams"),
            ("mixed", "needle"),
            ("high_entropy", "x"),
        ],
        strict=True,
    )
]


def texts(rows: tuple[Conversation, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(row.category, row.sub_category, row.turns) for row in rows]


@pytest.mark.parametrize("layout", list(layouts()))
def test_the_six_layouts_hold_the_same_conversations(layout: str, tmp_path: Path) -> None:
    rows = [*ROWS, placeholder(9, "cais/hle", "x")] if layout == "hub" else ROWS
    data = load(layouts()[layout](tmp_path, rows))
    assert (data.layout, data.config, data.subset) == (layout, "qualitative", "qualitative")
    want = [(row["category"], row["sub_category"], tuple(row["turns"])) for row in ROWS]
    if layout == "speculators":  # holds first turns, and the category in the file's name
        assert data.first_turn_only
        want = [(category, "", turns[:1]) for category, _, turns in want]
    else:
        assert [row.id for row in data.conversations[:4]] == [row["question_id"] for row in ROWS]
    assert texts(data.conversations[:4]) == want


def test_equal_texts_have_equal_digests(tmp_path: Path) -> None:
    whole = [name for name in layouts() if name != "speculators"]
    digests = {load(layouts()[name](tmp_path / name, ROWS)).sha256 for name in whole}
    assert len(digests) == 1


@pytest.mark.parametrize("layout", ["nemo-skills", "sglang", "speculators", "model-optimizer"])
def test_tiers_of_a_throughput_config(layout: str, tmp_path: Path) -> None:
    data = load(layouts("throughput_16k")[layout](tmp_path, TIERED))
    assert data.config == "throughput_16k"
    found = {(row.tier, row.sub_category, row.turns[0]) for row in data.conversations}
    assert found == {(r["category"], r["sub_category"], r["turns"][0]) for r in TIERED}


def test_a_folder_with_whole_and_split_files_is_read_once(tmp_path: Path) -> None:
    write_lines(tmp_path / "qualitative.jsonl", as_messages(ROWS))
    layouts()["speculators"](tmp_path, ROWS)
    assert len(load(tmp_path).conversations) == len(ROWS)


def test_a_folder_of_several_configs_asks_which(tmp_path: Path) -> None:
    write_lines(tmp_path / "qualitative.jsonl", ROWS)
    write_lines(tmp_path / "throughput_1k.jsonl", TIERED)
    with pytest.raises(ConfigError, match="qualitative, throughput_1k") as info:
        load(tmp_path)
    assert "--subset" in info.value.hint
    assert load(tmp_path, "throughput_1k").config == "throughput_1k"


def test_placeholders_are_found_and_the_clean_subset_says_what_it_is(tmp_path: Path) -> None:
    hle = [placeholder(n, "https://huggingface.co/datasets/cais/hle", str(n)) for n in (10, 11)]
    data = load(write_lines(tmp_path / "qualitative.jsonl", [*ROWS, *hle]))
    assert [row.id for row in data.placeholders] == ["id-10", "id-11"]
    kept = clean(data)
    assert kept.subset == "qualitative-no-hle-4of6"
    assert len(kept.conversations) == 4
    hole = dict(ROWS[0], question_id="id-12", turns=["Sum up: {article}"], source="cnn_dailymail")
    data = load(write_lines(tmp_path / "qualitative.jsonl", [*ROWS, hole]))
    assert clean(data).subset == "qualitative-no-cnn-dailymail-4of5"


def test_nothing_but_placeholders_is_no_subset(tmp_path: Path) -> None:
    data = load(write_lines(tmp_path / "q.jsonl", [placeholder(1, "cais/hle", "x")]))
    with pytest.raises(ConfigError, match="all 1 rows"):
        clean(data)


def test_a_part_is_named_as_such(tmp_path: Path) -> None:
    data = load(write_lines(tmp_path / "qualitative.jsonl", ROWS))
    assert narrow(data, ("coding",), None).subset == "qualitative-coding"
    assert narrow(data, ("coding",), 1).subset == "qualitative-coding-first-1of2"
    assert narrow(data, (), 9).subset == "qualitative"
    with pytest.raises(ConfigError, match="no category poetry") as info:
        narrow(data, ("poetry",), None)
    assert "coding, math, roleplay" in info.value.hint


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([_without(ROWS[0], "turns")], "neither turns nor messages"),
        ([dict(ROWS[0], turns=[])], "empty turn"),
        ([dict(ROWS[0], turns=["a", ""])], "empty turn"),
        ([ROWS[0], *as_messages(ROWS[1:2])], "mixes layouts"),
        ([ROWS[0], ROWS[0]], "question_id id-0"),
        (
            [_without(ROWS[0], "turns") | {"messages": [{"role": "assistant", "content": "x"}]}],
            "user messages only",
        ),
    ],
)
def test_damaged_files_are_refused(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_lines(tmp_path / "qualitative.jsonl", rows))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "qualitative.jsonl"
    for text, message in ((b"{]\n", "line 1 is not JSON"), (b"7\n", "not a JSON object")):
        bad.write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            load(bad)
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.jsonl")
    torn = tmp_path / "qualitative.parquet"
    torn.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot read"):
        load(torn)
