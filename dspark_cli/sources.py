"""What holds rows: JSONL files (gzipped or not), parquet, Hugging Face data sets, stdin."""

import gzip
import json
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

from dspark_cli.jsonl import BOM
from dspark_cli.patient import open_pipe, patient
from engine.errors import ConfigError

MAX_LINE_BYTES = 64 * 1024 * 1024
DATASET = re.compile(
    r"(?:hf:)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?"
)


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

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        with open_table(self.name, self.path) as table:
            yield from table_rows(table)

    def count(self) -> int | None:
        """As Source."""
        with open_table(self.name, self.path) as table:
            return int(table.metadata.num_rows)


class HubDataset:
    """A data set by its Hugging Face id, as NAME[@CONFIG][:SPLIT]."""

    def __init__(self, text: str) -> None:
        """Load it (from the Hub, or its cache).

        Raises:
            ConfigError: It cannot be loaded.
        """
        match = DATASET.fullmatch(text)
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
        yield from records(self._table)

    def count(self) -> int | None:
        """As Source."""
        return len(self._table)


def open_table(name: str, source: Any) -> Any:
    """A parquet file.

    Args:
        name: For messages.
        source: A path, or a file of pyarrow.

    Raises:
        ConfigError: It is none, or pyarrow is not there.
    """
    try:
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(f"reading {name} needs pyarrow", "pip install pyarrow") from None
    try:
        return pyarrow.parquet.ParquetFile(source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {name}: {error}", "check the file") from None


def table_rows(table: Any) -> Iterator[tuple[int, bytes | None]]:
    """Number and JSON text of each record of a parquet file."""
    batches = table.iter_batches(batch_size=256)
    yield from records(record for batch in batches for record in batch.to_pylist())


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


def records(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, bytes | None]]:
    """Records of a table as JSON text, so that they meet the same rules as lines."""
    for number, record in enumerate(rows, 1):
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
