"""Filling placeholders from files the user has; nothing is fetched.

A row is filled where its text can be told from the row and the source alone: the row holds its own
prompt with a hole for the source's text, or the source holds the whole turn. Rows whose prompt is
worded by the official script alone are taken from a file that it wrote (`--with`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from evals.speed_bench.layouts import Conversation, SpeedBench, load, records, subset_name
from evals.speed_bench.placeholders import MARKER, SOURCES, is_placeholder, source_of

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Given:
    """One `--source NAME[:PART]=FILE`."""

    name: str
    part: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> "Given":
        """Read the option.

        Raises:
            ConfigError: It names no source that can be filled.
        """
        left, equals, path = text.partition("=")
        name, _, part = left.partition(":")
        known = [s.name for s in SOURCES if s.file]
        if not equals or name not in known:
            raise ConfigError(
                f"--source {text}: write NAME=FILE, NAME one of {', '.join(known)}",
                "`--with FILE` takes rows that were built elsewhere",
            )
        if not Path(path).is_file():
            raise ConfigError(f"--source {text}: no such file", "check the path")
        return cls(name, part, Path(path))


@dataclass(slots=True)
class Prepared:
    """What came of it."""

    rows: list[Conversation]
    """Complete rows, in order."""

    filled: Counter[str] = field(default_factory=Counter)
    """Rows filled, by source."""

    missing: dict[str, list[Conversation]] = field(default_factory=dict)
    """Rows still without text, by why."""

    subset: str = ""


class Sources:
    """The given files, read when first needed."""

    def __init__(self, given: Sequence[Given]) -> None:
        self._given = given
        self._keyed: dict[tuple[str, str], dict[str, Record]] = {}
        self._listed: dict[tuple[str, str], list[Record]] = {}

    def has(self, name: str) -> bool:
        """Was any file of it given?"""
        return any(g.name == name for g in self._given)

    def by_key(self, name: str, key: str, value: str) -> Record | None:
        """The record whose `key` is `value`."""
        if (name, key) not in self._keyed:
            table = {str(r[key]): r for r in self._read(name, "") if key in r}
            self._keyed[name, key] = table
        return self._keyed[name, key].get(value)

    def at(self, name: str, index: str, part: str = "") -> Record | None:
        """The record at a position, from 0."""
        if (name, part) not in self._listed:
            self._listed[name, part] = list(self._read(name, part))
        rows = self._listed[name, part]
        return rows[int(index)] if index.isdecimal() and int(index) < len(rows) else None

    def _read(self, name: str, part: str) -> Iterator[Record]:
        for given in self._given:
            if given.name == name and given.part == part:
                yield from records(given.path)


def prepare(data: SpeedBench, given: Sequence[Given], built: Sequence[Path] = ()) -> Prepared:
    """Fill what can be filled.

    Args:
        data: Rows, some of them placeholders.
        given: Source files.
        built: Files with complete rows, in any layout that keeps `question_id`.
    """
    sources = Sources(given)
    ready = {row.id: row for path in built for row in load(path).conversations}
    out = Prepared(rows=[])
    for row in data.conversations:
        if not row.is_placeholder:
            out.rows.append(row)
            continue
        text, why = _filled(row, data.config, sources, ready)
        if text is None:
            out.missing.setdefault(why, []).append(row)
        else:
            out.rows.append(replace(row, turns=text))
            out.filled[why] += 1
    out.subset = data.subset
    if out.missing:
        gone = [row.source for rows in out.missing.values() for row in rows]
        out.subset = subset_name(data.subset, gone, tuple(out.rows), data)
    return out


def _filled(
    row: Conversation, config: str, sources: Sources, ready: Mapping[str, Conversation]
) -> tuple[tuple[str, ...] | None, str]:
    """The row's turns and where they come from, or None and why there are none."""
    there = ready.get(row.id)
    if there is not None and not there.is_placeholder:
        return there.turns, "built elsewhere"
    source = source_of(row.source)
    if source is None:
        return None, f"the source {row.source!r} is not known"
    fill = _FILL.get(source.name)
    if fill is None or (source.name == "hle" and config != "qualitative"):
        return None, f"{source.name}: only the official script builds its rows"
    if not sources.has(source.name):
        return None, f"{source.name}: no --source {source.name}=FILE"
    turns = fill(row, sources)
    if turns is None:
        return None, f"{source.name}: the given file lacks the row's record"
    if not turns or not all(turns) or is_placeholder(turns):
        return None, f"{source.name}: the record leaves holes"
    return turns, source.name


def _own_prompt(row: Conversation, values: Mapping[str, object]) -> tuple[str, ...] | None:
    """The prompt the row itself holds behind the marker, its holes filled."""
    prompt = row.turns[0].removeprefix(MARKER).lstrip("\n")
    filled, holes = _fill_holes(prompt, values)
    return (filled,) if holes else None


_HOLE = re.compile(r"\{(\w+)(?:\[(\w+)\])?\}")


def _fill_holes(prompt: str, values: Mapping[str, object]) -> tuple[str, int]:
    """Put values where `{name}` or `{name[key]}` is; nothing else is interpreted."""

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1], match[0])
        if match[2] is not None and isinstance(found, Mapping):
            found = found.get(match[2], match[0])
        return str(found)

    return _HOLE.subn(value, prompt)


def _cnn(row: Conversation, sources: Sources) -> tuple[str, ...] | None:
    found = sources.by_key("cnn-dailymail", "id", row.src_id)
    return None if found is None else _own_prompt(row, {"article": found["article"]})


def _hle(row: Conversation, sources: Sources) -> tuple[str, ...] | None:
    found = sources.by_key("hle", "id", row.src_id)
    return None if found is None else (str(found["question"]),)


def _livecodebench(row: Conversation, sources: Sources) -> tuple[str, ...] | None:
    found = sources.by_key("livecodebench", "question_id", row.src_id)
    if found is None:
        return None
    values = {"question": found["question_content"], "starter_code": found.get("starter_code", "")}
    return _own_prompt(row, values)


def _code_contests(row: Conversation, sources: Sources) -> tuple[str, ...] | None:
    found = sources.by_key("code-contests", "name", row.src_id)
    return None if found is None else _own_prompt(row, {"question": found["description"]})


def _mt_bench(row: Conversation, sources: Sources) -> tuple[str, ...] | None:
    found = sources.at("mt-bench-101", row.src_id.rpartition("_")[2])
    return None if found is None else tuple(str(entry["user"]) for entry in found["history"])


def _opus(row: Conversation, sources: Sources) -> tuple[str, ...] | None:
    _, part, index = [*row.src_id.split("_"), "", ""][:3]
    found = sources.at("opus-100", index, part)
    return None if found is None else _own_prompt(row, {"question": found["translation"]})


_FILL: dict[str, Callable[[Conversation, Sources], tuple[str, ...] | None]] = {
    "cnn-dailymail": _cnn,
    "hle": _hle,
    "livecodebench": _livecodebench,
    "code-contests": _code_contests,
    "mt-bench-101": _mt_bench,
    "opus-100": _opus,
}


def as_record(row: Conversation, subset: str) -> dict[str, Any]:
    """A prepared row as it is written: `turns` as a list, and the subset it is part of."""
    return {
        "question_id": row.id,
        "category": row.category,
        "sub_category": row.sub_category,
        "turns": list(row.turns),
        "source": row.source,
        "src_id": row.src_id,
        "multiturn": len(row.turns) > 1,
        "subset": subset,
    }
