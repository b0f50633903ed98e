"""Files of other file systems (S3, GCS, HDFS ...), as s3://BUCKET/KEY, read through pyarrow's."""

import fnmatch
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any

from dspark_cli.sources import Source, open_table, split_lines, table_rows
from engine.errors import ConfigError

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+-]+)://(?P<path>.*)", re.DOTALL)
_BUFFER_BYTES = 1 << 20


def is_remote(text: str) -> bool:
    """Whether INPUT is an address, as s3://BUCKET/KEY."""
    return _ADDRESS.fullmatch(text) is not None


@dataclass(frozen=True)
class RemoteLines:
    """JSONL, gzipped when its name says so."""

    system: Any
    path: str
    name: str

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        try:
            with self.system.open_input_stream(self.path, compression=None) as raw:
                stream: Any = io.BufferedReader(raw, _BUFFER_BYTES)
                if self.path.endswith(".gz"):
                    stream = gzip.GzipFile(fileobj=stream)
                yield from split_lines(stream)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"cannot read {self.name}: {error}", "check the file, then run the command again"
            ) from None

    def count(self) -> int | None:
        """Unknown: it would take reading all of it twice."""
        return None


@dataclass(frozen=True)
class RemoteParquet:
    """One row a record."""

    system: Any
    path: str
    name: str

    def _open(self) -> Any:
        try:
            return open_table(self.name, self.system.open_input_file(self.path))
        except OSError as error:
            raise ConfigError(f"cannot read {self.name}: {error}", "check the file") from None

    def rows(self, given_up: Event | None = None) -> Iterator[tuple[int, bytes | None]]:
        """As Source."""
        with self._open() as table:
            yield from table_rows(table)

    def count(self) -> int | None:
        """As Source."""
        with self._open() as table:
            return int(table.metadata.num_rows)


def open_remote(text: str, suffixes: tuple[str, ...]) -> list[Source]:
    """The files at an address.

    Args:
        text: The address of a file, a folder, or files whose last name has * or ? in it.
        suffixes: How names of files with rows end.

    Returns:
        At least one, by name.

    Raises:
        ConfigError: There is none, or the file system cannot be reached.
    """
    system, path = _file_system(text)
    try:
        paths = _find(system, path, suffixes)
    except OSError as error:
        raise ConfigError(f"cannot read {text}: {error}", "check the address and access") from None
    if not paths:
        raise ConfigError(f"no such input: {text}", "give the address of a file or a folder")
    head = text[: text.rindex(path)] if path in text else ""
    return [_source(system, each, head + each) for each in paths]


def _file_system(text: str) -> tuple[Any, str]:
    try:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]
        from pyarrow import fs  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(f"reading {text} needs pyarrow", "pip install pyarrow") from None
    marked = text.replace("?", "%3F")  # a glob's mark, not the beginning of a query
    try:
        system, path = fs.FileSystem.from_uri(marked)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"cannot open {text}: {reason[0]}",
            "give an address as s3://, gs://, hdfs:// or file://",
        ) from None
    return system, path


def _find(system: Any, path: str, suffixes: tuple[str, ...]) -> list[str]:
    from pyarrow import fs

    found = system.get_file_info(path)
    if found.type == fs.FileType.File:
        return [path]
    folder, _, last = path.rpartition("/")
    pattern = "*"
    if found.type == fs.FileType.NotFound:
        if not any(mark in last for mark in "*?["):
            return []
        path, pattern = folder, last
    files = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return sorted(
        file.path
        for file in files
        if file.type == fs.FileType.File
        and not file.base_name.startswith(".")
        and fnmatch.fnmatchcase(file.base_name, pattern)
        and (pattern != "*" or file.base_name.endswith(suffixes))
    )


def _source(system: Any, path: str, name: str) -> Source:
    kind = RemoteParquet if path.endswith(".parquet") else RemoteLines
    return kind(system, path, name)
