"""Where rows come from: JSONL files (gzipped or not), folders, globs, parquet, data sets, stdin.

Rows stream: a file is never held in memory, and any number of rows may pass.
"""

import fnmatch
import glob
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO, Protocol

from dspark_cli.jsonl import BOM, loads
from dspark_cli.patient import open_pipe, patient
from engine.errors import ConfigError, RequestError

MAX_LINE_BYTES = 64 * 1024 * 1024
_LINES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_SUFFIXES = (*_LINES, ".parquet")
_DATASET = re.compile(
    r"(?:hf:)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?"
)


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


class Source(Protocol):
    """Something that holds rows."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """Line number and JSON text of each row, blank lines left out.

        Args:
            given_up: Once it is set, nothing waits for more to come.
        """
        ...

    def count(self) -> int | None:
        """Rows held; None if only reading tells."""
        ...


@dataclass(frozen=True)
class LinesFile:
    """JSONL, gzipped when its name says so."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @contextmanager
    def _open(self, given_up: Event | None) -> Iterator[BinaryIO]:
        with ExitStack() as stack:
            stream: Any
            if given_up is None or self.path.is_file():
                stream = stack.enter_context(self.path.open("rb"))
            else:
                stream = patient(stack.enter_context(open_pipe(self.path)), given_up)
            if self.path.name.endswith(".gz"):
                stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
            yield stream

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        try:
            with self._open(given_up) as stream:
                yield from split_lines(stream)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"cannot read {self.path}: {error}", "check the file, then run the command again"
            ) from None

    def count(self) -> int | None:
        """As Source: one quick pass over the file; none over a pipe, which is read only once."""
        return sum(1 for _ in self.rows()) if self.path.is_file() else None


@dataclass(frozen=True)
class Stdin:
    """Lines from standard input."""

    name: str = "stdin"

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        stream: Any = sys.stdin.buffer
        raw = getattr(stream, "raw", None)
        if given_up is not None and raw is not None:
            stream = patient(raw, given_up)
        yield from split_lines(stream)

    def count(self) -> int | None:
        """Unknown."""
        return None


@dataclass(frozen=True)
class ParquetFile:
    """One row a record."""

    path: Path

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def _open(self) -> Any:
        try:
            import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError(f"reading {self.path} needs pyarrow", "pip install pyarrow") from None
        try:
            return pyarrow.parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {self.path}: {error}", "check the file") from None

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        with self._open() as table:
            batches = table.iter_batches(batch_size=256)
            yield from _records(record for batch in batches for record in batch.to_pylist())

    def count(self) -> int | None:
        """As Source."""
        with self._open() as table:
            return int(table.metadata.num_rows)


class HubDataset:
    """A data set by its Hugging Face id, as NAME[@CONFIG][:SPLIT]."""

    def __init__(self, text: str) -> None:
        """Load it (from the Hub, or its cache).

        Raises:
            ConfigError: It cannot be loaded.
        """
        match = _DATASET.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a data set id", "write NAME/NAME[@CONFIG][:SPLIT]")
        try:
            import datasets  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError(
                f"{text} is not a file, and reading it as a data set needs `datasets`",
                "check the path, or pip install datasets",
            ) from None
        self.name = text
        split = match["split"] or "train"
        try:
            self._table = datasets.load_dataset(match["name"], match["config"], split=split)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"{text} is neither a file nor a data set that loads: {reason[0]}",
                "check the name, NAME/NAME[@CONFIG][:SPLIT], and the network; or give a file",
            ) from None

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        yield from _records(self._table)

    def count(self) -> int | None:
        """As Source."""
        return len(self._table)


def open_sources(text: str) -> list[Source]:
    """The sources INPUT names.

    Args:
        text: `-`, a file, a folder, a glob, or a data set id.

    Returns:
        At least one source, in reading order.

    Raises:
        ConfigError: There is none, or one is of an unknown kind.
    """
    if text == "-":
        return [Stdin()]
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
    if text == "-":
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
        return total if self.limit is None else min(total, self.limit)

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


def split_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Number and text of each line that is not blank; only \\n ends a line.

    `str.splitlines` would also split at U+2028 and U+0085, which may stand inside JSON strings.
    """
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
            yield number, None
            continue
        stripped = line.removeprefix(BOM).strip(b" \t\r\n")
        if stripped:
            yield number, stripped


def _looks_like_dataset(text: str) -> bool:
    """Shaped like an id, and not like a file that is missing from a folder here."""
    here = Path(text).parent.is_dir()
    return not here and not text.endswith(_SUFFIXES) and _DATASET.fullmatch(text) is not None


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


def _records(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, bytes | None]]:
    """Records of a table as JSON text, so that they meet the same rules as lines."""
    for number, record in enumerate(records, 1):
        text = json.dumps(dict(record), ensure_ascii=False, default=_as_json)
        yield number, text.encode("utf-8", "surrogatepass")


def _as_json(value: object) -> object:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return {"bytes": len(value)}  # an image, say: no text row needs it, so its size will do
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
