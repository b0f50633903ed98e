"""Where rows come from: files, folders, globs, data sets, stdin, other file systems.

Rows stream: a file is never held in memory, and any number of rows may pass.
"""

import fnmatch
import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from dspark_cli.jsonl import loads
from dspark_cli.remote import is_remote, open_remote
from dspark_cli.sources import (
    DATASET,
    MAX_LINE_BYTES,
    HubDataset,
    LinesFile,
    ParquetFile,
    Source,
    Stdin,
)
from engine.errors import ConfigError, RequestError

_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_SUFFIXES = (*_LINES, ".parquet")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row before it is understood."""

    index: int
    """Position among all rows of the run, from 0."""

    line: int
    """Line in its file, or record in its table, from 1."""

    source: str
    """The file, or the data set."""

    data: bytes | None
    """The row as JSON text; None if it is too long to be one."""

    def load(self) -> dict[str, Any]:
        """The row's fields.

        Raises:
            RequestError: Kind `parse` or `schema`.
        """
        if self.data is None:
            raise RequestError(
                "parse", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", "split the row"
            )
        return loads(self.data)


def open_sources(text: str) -> list[Source]:
    """The sources INPUT names.

    Args:
        text: `-`, a file, a folder, a glob, a data set id, or the address of a file or folder as
            s3://BUCKET/KEY.

    Returns:
        At least one source, in reading order.

    Raises:
        ConfigError: There is none, or one is of an unknown kind.
    """
    if text == "-":
        return [Stdin()]
    if is_remote(text):
        return open_remote(text, _SUFFIXES)
    path = Path(text)
    if path.is_dir():
        files = [p for p in sorted(path.iterdir()) if p.is_file() and p.name.endswith(_SUFFIXES)]
        if not files:
            raise ConfigError(
                f"the folder {text} holds no rows", f"put {', '.join(_SUFFIXES)} files into it"
            )
        return [_file(p) for p in files if not p.name.startswith(".")]
    if path.exists():
        return [_file(path)]
    if any(mark in text for mark in "*?["):
        found = sorted(glob.glob(text, recursive=True))  # leaves hidden files out, as shells do
        files = [p for p in map(Path, found) if p.is_file()]
        if files:
            return [_file(p) for p in files]
    if _looks_like_dataset(text):
        return [HubDataset(text)]
    raise ConfigError(
        f"no such input: {text}", "give a file, a folder, a glob, a data set id, or -"
    )


def takes_in(text: str, path: Path) -> bool:
    """Whether INPUT is a folder or glob that takes in `path`, once there is such a file.

    Args:
        text: As for `open_sources`.
        path: A file that may not be there yet.
    """
    if text == "-" or is_remote(text):
        return False
    given = Path(text)
    if given.is_dir():
        here = path.resolve().parent == given.resolve()
        return here and path.name.endswith(_SUFFIXES) and not path.name.startswith(".")
    if given.exists() or not any(mark in text for mark in "*?["):
        return False
    names = Path(os.path.abspath(text)).parts
    return any(_matches(names, Path(os.path.abspath(p)).parts) for p in (path, path.resolve()))


def _matches(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """As glob.glob with `recursive` would."""
    if not pattern or not names:
        return not names and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        deeper = not names[0].startswith(".") and _matches(pattern, names[1:])
        return deeper or _matches(pattern[1:], names)
    hidden = names[0].startswith(".") and not pattern[0].startswith(".")
    fits = not hidden and fnmatch.fnmatchcase(names[0], pattern[0])
    return fits and _matches(pattern[1:], names[1:])


class Rows:
    """All rows of a run, in order, with what passing them tells.

    Args:
        sources: Where they come from.
        limit: Read at most this many.
    """

    def __init__(self, sources: list[Source], limit: int | None = None) -> None:
        self.sources = sources
        self.limit = limit
        self.total: int | None = None
        """What `count` has found."""
        self.read = 0
        self.given_up = Event()
        """Once it is set, nothing waits for more rows."""

        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Digest of the rows read so far, each as its JSON text."""
        return self._digest.hexdigest()

    def count(self) -> int | None:
        """Rows to come in all; None if only reading tells.

        Raises:
            ConfigError: There are none, or a file cannot be read.
        """
        counts = [source.count() for source in self.sources]
        if any(count is None for count in counts):
            return None
        total = sum(count for count in counts if count is not None)
        if total == 0:
            names = ", ".join(source.name for source in self.sources)
            raise ConfigError(f"no rows in {names}", "write one JSON object a line")
        self.total = total if self.limit is None else min(total, self.limit)
        return self.total

    def __iter__(self) -> Iterator[RawRow]:
        """Read; once. Whatever thread reads, `given_up` ends its waiting."""
        for source in self.sources:
            for line, data in source.rows(self.given_up):
                self._digest.update(data or b"")
                self._digest.update(b"\n")
                row = RawRow(self.read, line, source.name, data)
                self.read += 1
                yield row
                if self.limit is not None and self.read >= self.limit:
                    return  # before the next row is waited for


def _looks_like_dataset(text: str) -> bool:
    """Shaped like an id, and not like a file that is missing from a folder here."""
    here = Path(text).parent.is_dir()
    return not here and not text.endswith(_SUFFIXES) and DATASET.fullmatch(text) is not None


def _file(path: Path) -> Source:
    if not path.is_file():
        return LinesFile(path)  # a pipe: nothing is read before its rows are wanted
    if path.name.endswith(".parquet"):
        return ParquetFile(path)
    if path.name.endswith((".json", ".json.gz")):
        _reject_array(path)
    return LinesFile(path)


def _reject_array(path: Path) -> None:
    first = next(LinesFile(path).rows(), (0, b""))[1] or b""
    if first.startswith(b"["):
        raise ConfigError(
            f"{path} is one JSON array, not one object a line",
            f"jq -c '.[]' {path} > {path.name.split('.')[0]}.jsonl",
        )
