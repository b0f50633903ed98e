"""Output rows: what they hold, and how they reach the disk in input order."""

import array
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dspark_cli.journal import Journal
from dspark_cli.jsonl import dumps
from dspark_cli.reader import RawRow
from dspark_cli.sampling import effective
from dspark_cli.sharding import Shard
from engine.errors import ConfigError, DSparkError
from engine.request import Completion


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """The files of one run."""

    rows: Path | None
    """None writes to stdout."""

    errors: Path | None
    journal: Path | None

    @classmethod
    def of(cls, output: str, shard: Shard | None = None) -> "OutputPaths":
        """Names beside `output`: `x.jsonl` has `x.errors.jsonl` and `x.journal`.

        Any other name `x` has `x.out.errors.jsonl` and `x.out.journal`, so that `-o x` and
        `-o x.jsonl` share nothing; what an earlier version named as for `x.jsonl` is gone on with.

        Raises:
            ConfigError: The name promises a format that is not written.
        """
        if output == "-":
            return cls(None, None, None)
        rows = Path(output)
        if rows.is_symlink():
            rows = rows.resolve()  # the file it points to is replaced, not the link
        if rows.name.endswith((".gz", ".parquet", ".csv", ".zst")):
            raise ConfigError(f"-o {output}: only JSONL is written", "use a name ending in .jsonl")
        if shard is not None:
            rows = shard.path(rows)
        stem = rows.name.removesuffix(".jsonl")
        if stem == rows.name and not _named_by_old_version(rows):
            stem += ".out"
        return cls(rows, rows.with_name(stem + ".errors.jsonl"), rows.with_name(stem + ".journal"))


def _named_by_old_version(rows: Path) -> bool:
    """Whether there is an output without .jsonl whose journal must be its own."""

    def there(suffix: str) -> bool:
        return rows.with_name(rows.name + suffix).exists()

    return there("") and there(".journal") and not there(".jsonl") and not there(".out.journal")


def completion_row(completion: Completion, row_id: str | int, drafted: bool) -> dict[str, Any]:
    """The output row, but for `index`, `sample` and `input`, which may differ in the next run."""
    params = completion.request.params
    return {
        "id": row_id,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        "usage": {
            "prompt_tokens": len(completion.request.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
        },
        "sampling": effective(params),
        "spec": _spec(completion) if drafted else None,
    }


def _spec(completion: Completion) -> dict[str, Any]:
    rounds = completion.rounds
    committed = sum(r.committed for r in rounds)
    return {
        "rounds": len(rounds),
        "drafted": sum(r.drafted for r in rounds),
        "accepted": sum(r.accepted for r in rounds),
        "acceptance_length": round(committed / len(rounds), 4) if rounds else None,
    }


class Slots:
    """One slot an output line, in input order, with the place of its record in the journal.

    This is all that is kept of a row that is done: about 40 bytes.
    """

    def __init__(self, sources: list[str]) -> None:
        self.sources = sources
        self._source_at = {name: at for at, name in enumerate(sources)}
        self._offset = array.array("q")
        self._index = array.array("q")
        self._line = array.array("q")
        self._source = array.array("i")
        self._sample = array.array("i")
        self._newer_data: dict[int, int] = {}
        self.filled = 0

    def __len__(self) -> int:
        """Slots opened."""
        return len(self._offset)

    def open(self, raw: RawRow, sample: int | None = None) -> int:
        """A slot for one more output line; `sample` when the row has several."""
        self._offset.append(-1)
        self._index.append(raw.index)
        self._line.append(raw.line)
        self._source.append(self._source_at[raw.source])
        self._sample.append(-1 if sample is None else sample)
        return len(self._offset) - 1

    def fill(self, slot: int, offset: int, data_offset: int = -1) -> None:
        """Say where the record lies; a newer record of the data fields may lie elsewhere."""
        self._offset[slot] = offset
        self.filled += 1
        if data_offset >= 0:
            self._newer_data[slot] = data_offset

    def is_filled(self, slot: int) -> bool:
        """Whether its record is known."""
        return self._offset[slot] >= 0

    def output(self, slot: int, journal: Journal, passthrough: bool) -> tuple[bool, dict[str, Any]]:
        """The output line of a filled slot.

        Returns:
            Whether it is a completion (not a failure), and the line.
        """
        record = journal.read(self._offset[slot])
        good = record["type"] == "row"
        body = record["row" if good else "error"]
        line: dict[str, Any] = {"id": body.pop("id"), "index": self._index[slot]}
        if self._sample[slot] >= 0:
            line["sample"] = self._sample[slot]
        if not good:
            line["line"] = self._line[slot]
            if len(self.sources) > 1:
                line["file"] = self.sources[self._source[slot]]
            return False, line | body
        line |= body
        if passthrough:
            newer = self._newer_data.get(slot)
            line["input"] = (record if newer is None else journal.read(newer)).get("data", {})
        return True, line


class StdoutRows:
    """Lines to stdout in input order, as soon as all earlier ones are done.

    What is done early waits in the journal (a temporary file), so a slow row costs no memory.
    """

    def __init__(self, slots: Slots, journal: Journal, passthrough: bool) -> None:
        self._slots = slots
        self._journal = journal
        self._passthrough = passthrough
        self._stream = sys.stdout.buffer  # a cluster's messages may be kept from sys.stdout
        self._next = 0

    def flush(self) -> None:
        """Write what is ready; a failed row is a line with `finish_reason` `error`."""
        before = self._next
        while self._next < len(self._slots) and self._slots.is_filled(self._next):
            good, line = self._slots.output(self._next, self._journal, self._passthrough)
            if not good:
                line = failure_line(line)
            self._stream.write(dumps(line))
            self._next += 1
        if self._next != before:
            self._stream.flush()


def failure_line(error: dict[str, Any]) -> dict[str, Any]:
    """A failed row as a line among completions, for stdout, which has no errors file beside it."""
    names = ("class", "message", "hint", "retryable")
    line = {name: value for name, value in error.items() if name not in names}
    line["finish_reason"] = "error"
    line["error"] = {name: error[name] for name in names}
    return line


def write_final(paths: OutputPaths, slots: Slots, journal: Journal, passthrough: bool) -> int:
    """Write OUT and its errors file in input order, each in one atomic step.

    Args:
        paths: Where to.
        slots: All filled.
        journal: Holds the rows.
        passthrough: Whether lines carry `input`.

    Returns:
        How many lines are failures; without any, no errors file is left.

    Raises:
        DSparkError: The disk refuses; the journal keeps everything.
    """
    if paths.rows is None or paths.errors is None:
        raise ValueError("stdout has no final file")
    try:
        with Replacing(paths.rows) as rows, Replacing(paths.errors) as errors:
            failures = 0
            for slot in range(len(slots)):
                good, line = slots.output(slot, journal, passthrough)
                (rows if good else errors).write(dumps(line))
                failures += not good
            rows.commit()
            errors.commit(keep=failures > 0)
    except OSError as error:
        raise DSparkError(
            f"cannot write {error.filename or paths.rows}: {error.strerror}",
            "all rows are in the journal: make room, then run the same command again",
        ) from None
    return failures


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file in one step: a reader sees the old one or the new one."""
    with Replacing(path) as stream:
        stream.write(data)
        stream.commit()


def check_folder(path: Path) -> None:
    """Refuse a file that could not be written at the end.

    Raises:
        ConfigError: Its folder does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", f"mkdir -p {path.parent}")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write numbers for other programs.

    Raises:
        DSparkError: The disk refuses.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step.

    Raises:
        DSparkError: The disk refuses.
    """
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error.strerror}", "choose another name") from None


class Replacing:
    """A new file that takes its name only when it is whole and on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = path.with_name(f".{path.name}.{os.getpid()}.new")
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> "Replacing":
        self._stream = self._new.open("wb", buffering=1 << 20)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            with suppress(OSError):  # the disk is full: closing writes again
                self._stream.close()
            self._new.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Add bytes."""
        self._opened().write(data)

    def commit(self, keep: bool = True) -> None:
        """Take the name; without `keep`, leave no file of that name."""
        stream = self._opened()
        stream.flush()
        if keep:
            os.fsync(stream.fileno())
            stream.close()
            os.replace(self._new, self._path)
        else:
            self._path.unlink(missing_ok=True)

    def _opened(self) -> IO[bytes]:
        if self._stream is None:
            raise ValueError("not open")
        return self._stream


def first_completions(
    slots: Slots, journal: Journal, count: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The first `count` completions, with their slots."""
    for slot in range(len(slots)):
        if count == 0:
            return
        if not slots.is_filled(slot):
            continue
        good, line = slots.output(slot, journal, False)
        if good:
            count -= 1
            yield slot, line
