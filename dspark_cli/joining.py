"""Shards' files checked against each other, and joined in input order."""

import heapq
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dspark_cli.fingerprint import (
    DECISIVE,
    NOTED,
    SAMPLING_OF_ROWS,
    SPECULATIVE,
    changes,
)
from dspark_cli.journal import read_run
from dspark_cli.jsonl import loads
from dspark_cli.output import OutputPaths, Replacing
from dspark_cli.sharding import Shard
from engine.errors import ConfigError, DSparkError, RequestError

_SHOWN = 20
_SAME = DECISIVE + SPECULATIVE
"""Settings of one run: a resumed run may change some of them, shards of one run do not differ."""

_KEPT = tuple(name for name in _SAME if name not in {*SAMPLING_OF_ROWS, "max_model_len"})
"""Of these, what rows that a resumed run left as they were have of the run before: those whose
sampling changed were made again, and so were those that a longer context has room for."""

_FREE = tuple(name for name in NOTED if name not in SPECULATIVE)
_ASKED = ("max_tokens", "n", "passthrough")
"""Settings that a finished shard's journal notes at its end."""


@dataclass(frozen=True, slots=True)
class Part:
    """The files of one shard."""

    shard: Shard
    rows: Path
    errors: Path
    headers: list[dict[str, Any]]
    """What its rows were made with: more than one if it was resumed with other settings."""

    complete: dict[str, Any] | None
    """What the shard had read and written when it was finished; None if it never was."""

    @classmethod
    def read(cls, path: Path) -> "Part":
        """The shard whose output is `path`.

        Raises:
            ConfigError: It is no shard's, or its journal is not there.
        """
        paths = OutputPaths.of(str(path))
        assert paths.rows is not None
        assert paths.errors is not None
        assert paths.journal is not None
        if not paths.journal.exists():
            raise ConfigError(
                f"there is no {paths.journal}, which says how {path} was made",
                "keep the journals of the shards beside their outputs",
            )
        headers, complete = read_run(paths.journal)
        if not headers or "shard" not in headers[-1]:
            raise ConfigError(f"{path} is not the output of a run with --shard", "leave it out")
        number, count = (int(part) for part in headers[-1]["shard"].split("/"))
        return cls(Shard(number, count), paths.rows, paths.errors, headers, complete)

    @property
    def header(self) -> dict[str, Any]:
        """What it was last run with."""
        return self.headers[-1]


def check_parts(parts: list[Part]) -> list[str]:
    """Whether these are all shards of one run.

    Returns:
        What differs between them and changes no outputs.

    Raises:
        ConfigError: They are not; lists everything that is wrong.
    """
    wrong = _wrong_set(parts)
    notes: list[str] = []
    made = [(part, header) for part in parts for header in part.headers]
    for part, header in made:
        same = _SAME if header is part.header else _KEPT
        for names, found in ((same, wrong), (_FREE, notes)):
            for change in changes(parts[0].header, header, names):
                if "auto" not in (change.then, change.now):  # no row of it needed an engine
                    text = _between(change.name, change.then, parts[0], change.now, part)
                    found.append(text + " before it was resumed" * (header is not part.header))
    wrong += _other_runs(parts)
    if wrong:
        raise _refuse("these are not all shards of one run", wrong)
    return notes


def _wrong_set(parts: list[Part]) -> list[str]:
    """Shards that are missing, there twice, unfinished or of another split."""
    first, count = parts[0], parts[0].shard.count
    wrong = [
        f"{part.rows} is shard {part.shard}, {first.rows} is {first.shard}"
        for part in parts[1:]
        if part.shard.count != count
    ]
    for number in range(1, count + 1):
        here = [part for part in parts if part.shard == Shard(number, count)]
        if not here:
            wrong.append(f"shard {number}/{count} is missing")
        elif len(here) > 1:
            names = ", ".join(str(part.rows) for part in here)
            wrong.append(f"shard {number}/{count} is there {len(here)} times: {names}")
    for part in parts:
        if part.complete is None or not part.rows.exists():
            wrong.append(f"shard {part.shard} is not finished: run its command again")
    return wrong


def join(parts: list[Part], rows: Path, errors: Path) -> tuple[int, int]:
    """Write all shards' lines in input order, each file in one atomic step.

    Args:
        parts: Checked by `check_parts`.
        rows: Where completions go.
        errors: Where failures go; without any, no such file is left.

    Returns:
        How many lines there are in all, and how many of them are failures.

    Raises:
        ConfigError: A row is missing or there twice; lists them. Nothing is written.
        DSparkError: The disk refuses.
    """
    complete = parts[0].complete
    assert complete is not None
    check = _Check(complete["rows_read"])
    failures = 0
    try:
        with ExitStack() as stack:
            out = stack.enter_context(Replacing(rows))
            bad = stack.enter_context(Replacing(errors))
            every = [_lines(part, good, stack) for part in parts for good in (True, False)]
            for line in heapq.merge(*every, key=_place):
                check.see(line)
                (out if line.good else bad).write(line.data)
                failures += not line.good
            check.end(parts)
            out.commit()
            bad.commit(keep=failures > 0)
    except OSError as error:
        raise DSparkError(
            f"cannot join the shards: {error.filename or rows}: {error.strerror}",
            "free some space, or raise ulimit -n; the shards stay as they are",
        ) from None
    return check.lines, failures


@dataclass(frozen=True, slots=True)
class _Line:
    part: Part
    good: bool
    data: bytes
    index: int
    sample: int
    row_id: str | int | None


def _place(line: _Line) -> tuple[int, int]:
    return line.index, line.sample


@dataclass(slots=True)
class _Check:
    """Looks at lines as they come in order.

    Args:
        rows: Rows of the whole input.
    """

    rows: int
    lines: int = 0
    doubled: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    strange: list[str] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    _last: tuple[int, int] = (-1, 0)

    def see(self, line: _Line) -> None:
        """The next line."""
        index, sample = place = _place(line)
        self.lines += 1
        self.counts[line.part.shard.number] = self.counts.get(line.part.shard.number, 0) + 1
        if not line.part.shard.holds(str(index) if line.row_id is None else line.row_id):
            self.strange.append(f"{_name(line)} is not of shard {line.part.shard}")
        if place == self._last:
            self.doubled.append(_name(line))
            return
        if index == self._last[0]:
            self.missing += [f"row {index} sample {n}" for n in range(self._last[1] + 1, sample)]
        else:
            self.missing += [f"row {n}" for n in range(self._last[0] + 1, index)]
            self.missing += [f"row {index} sample {n}" for n in range(sample)]
        self._last = place

    def end(self, parts: list[Part]) -> None:
        """All lines were seen.

        Raises:
            ConfigError: They are not what they should be.
        """
        self.missing += [f"row {n}" for n in range(self._last[0] + 1, self.rows)]
        wrong = _listed("missing", self.missing) + _listed("there twice", self.doubled)
        wrong += self.strange[:_SHOWN]
        for part in parts:
            assert part.complete is not None
            found, then = self.counts.get(part.shard.number, 0), part.complete["lines"]
            if found != then:
                wrong.append(
                    f"shard {part.shard} has {found} lines, and had {then} when it was finished"
                )
        if wrong:
            raise _refuse("the shards do not make up the input", wrong)


def _lines(part: Part, good: bool, stack: ExitStack) -> Iterator[_Line]:
    path = part.rows if good else part.errors
    if not path.exists():
        return
    stream: IO[bytes] = stack.enter_context(path.open("rb"))
    for number, data in enumerate(stream, 1):
        try:
            line = loads(data)
            index, sample = int(line["index"]), int(line.get("sample", 0))
            yield _Line(part, good, data, index, sample, line["id"])
        except (RequestError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} line {number} is not a line of dspark's: {error}",
                "run its shard again: it writes the file anew from its journal",
            ) from None


def _name(line: _Line) -> str:
    return f"row {line.index} ({line.row_id!r})" + (f" sample {line.sample}" if line.sample else "")


def _listed(what: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return [f"{what}: {', '.join(rows[:_SHOWN])}{more}"]


def _between(name: str, then: Any, first: Part, now: Any, part: Part) -> str:
    return f"{name.replace('_', '-')}: {then!r} in {first.shard}, {now!r} in {part.shard}"


def _other_runs(parts: list[Part]) -> list[str]:
    known = [part for part in parts if part.complete is not None]
    wrong: list[str] = []
    for part in known[1:]:
        mine, theirs = known[0].complete, part.complete
        assert mine is not None
        assert theirs is not None
        wrong += [
            _between(change.name, change.then, known[0], change.now, part)
            for change in changes(mine, theirs, _ASKED)
        ]
        if (mine["rows_read"], mine["sha256"]) != (theirs["rows_read"], theirs["sha256"]):
            wrong.append(
                f"shard {part.shard} has read {theirs['rows_read']} rows, which are not the "
                f"{mine['rows_read']} of {known[0].shard}: one of them had another INPUT"
            )
    return wrong


def _refuse(message: str, wrong: list[str]) -> ConfigError:
    more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    text = "".join(f"\n  {each}" for each in wrong[:_SHOWN] + more)
    return ConfigError(
        f"{message}:{text}",
        "run the shards that are named again, with one INPUT and one set of options (with "
        "--overwrite where one was resumed with others)",
    )
