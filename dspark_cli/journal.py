"""The journal: finished rows as they end, so that no crash costs more than the rows in flight.

One JSON object a line, appended and synced; the first line says what the run was. It is kept after
the run: it is what makes a second run, `--rerun`, a larger `--n` or an edited input cheap.
"""

import array
import fcntl
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspark_cli.jsonl import canonical, dumps, loads
from engine.errors import ConfigError, DSparkError, RequestError

SYNC_SECONDS = 0.5
SYNC_ROWS = 32
FORMAT = 1


class Status(IntEnum):
    """What a record says of its row."""

    STOP = 0
    LENGTH = 1
    FAILED = 2
    TOO_LONG = 3
    """Failed because of the context's length, which another run may change."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A recorded row, without its text."""

    offset: int
    status: Status
    tokens: int
    """Of the longest turn; for a turn that was too long, the max_tokens of those before it."""

    limit: int
    """The row's max_tokens; for a row that was too long, the context asked for (0: none)."""

    data: int
    """Digest of the row's data fields."""

    data_offset: int
    """A newer record of the data fields, -1 if they are in the row's own record."""


def row_key(row_id: str, sample: int, request: object, sampling: Mapping[str, Any]) -> str:
    """Name of one completion: equal keys have equal outputs.

    `max_tokens` is left out: an output that ended by itself is the same under any larger limit
    (see Journal.find), so raising the limit redoes only rows that were cut.
    """
    rest = {name: value for name, value in sampling.items() if name != "max_tokens"}
    return digest([row_id, sample, request, rest])


def digest(value: object) -> str:
    """32 hex digits naming a JSON value."""
    return hashlib.blake2b(canonical(value), digest_size=16).hexdigest()


class Journal:
    """An append-only file of records, and where each row's record lies.

    Args:
        path: The file; None keeps the records in a temporary file without a name.
        restart: Throw away what it holds.

    Raises:
        ConfigError: Another run is writing it, or it is no journal.
    """

    def __init__(self, path: Path | None, *, restart: bool = False) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        self.complete: dict[str, Any] | None = None
        """What the last finished run of a shard had read and written."""
        self.has_completions = False
        """Whether there is anything to lose: a header alone binds nobody."""
        self.torn_bytes = 0
        """Length of the unfinished last line that was cut off."""
        self.bad_lines: list[int] = []
        """Lines in the middle that are not records; their rows run again."""
        self._at: dict[bytes, int] = {}
        self._offsets = array.array("q")
        self._numbers = array.array("q")  # status, tokens, limit of each
        self._data = array.array("Q")
        self._newer_data: dict[int, int] = {}
        self._unsynced = 0
        self._synced_at = time.monotonic()
        self._failure: OSError | None = None
        self._fd = _open(path)
        try:
            if restart:
                os.ftruncate(self._fd, 0)
            self._end = os.fstat(self._fd).st_size
            self._load()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Sync and close; a failure to do so does not hide the error that came first."""
        with suppress(DSparkError) if error is not None else nullcontext():
            self.close()

    def __len__(self) -> int:
        """Rows recorded."""
        return len(self._at)

    def find(self, key: str) -> Entry | None:
        """The last record of a row, None if it has none; from any thread."""
        at = self._at.get(bytes.fromhex(key))
        return None if at is None else self._entry(at)

    def entries(self) -> Iterator[Entry]:
        """All rows' last records."""
        return (self._entry(at) for at in self._at.values())

    def append(self, record: dict[str, Any]) -> int:
        """Write a record.

        Args:
            record: `type` is `header`, `row`, `error`, `data` or `complete`; a row, an error and
                data have a `key`.

        Returns:
            Its offset, for `read`.

        Raises:
            DSparkError: The disk refuses; what was written before stays valid.
        """
        line = dumps(record)
        try:
            if self._failure is not None:
                raise self._failure
            self._write(line)
        except OSError as error:
            raise _disk_error(self.path, error) from None
        offset = self._end
        self._end += len(line)
        self._note(record, offset)
        self._unsynced += 1
        if self._unsynced >= SYNC_ROWS:
            self.sync()
        return offset

    def read(self, offset: int) -> dict[str, Any]:
        """The record at `offset`."""
        size = 4096
        while True:
            chunk = os.pread(self._fd, size, offset)
            end = chunk.find(b"\n")
            if end >= 0:
                return loads(chunk[:end])
            if len(chunk) < size:
                raise DSparkError(f"the journal {self.path} was cut while it was in use")
            size *= 8

    def sync(self) -> None:
        """Make everything appended survive a power cut.

        Raises:
            DSparkError: The disk refuses.
        """
        self._unsynced = 0
        self._synced_at = time.monotonic()
        try:
            if self.path is not None:
                os.fsync(self._fd)
        except OSError as error:
            raise _disk_error(self.path, error) from None

    def sync_if_due(self) -> None:
        """From another thread: sync what waits too long; `append` reports a failure."""
        if self._unsynced and time.monotonic() - self._synced_at >= SYNC_SECONDS:
            try:
                self.sync()
            except DSparkError as error:
                self._failure = OSError(str(error))

    def close(self) -> None:
        """Sync and close; again does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if self.path is not None:
                os.fsync(fd)
        except OSError as error:
            raise _disk_error(self.path, error) from None
        finally:
            os.close(fd)

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:
                left = left[_write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, self._end)  # no torn line in the middle
            raise

    def _load(self) -> None:
        if self._end == 0:
            return
        good = 0
        with open(os.dup(self._fd), "rb") as stream:
            stream.seek(0)
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._note(loads(line), good)
                except (RequestError, KeyError, TypeError, ValueError):
                    self.bad_lines.append(number)
                good += len(line)
        self.torn_bytes = self._end - good
        if self.header is None and (good > 0 or not _may_be_ours(self._fd)):
            raise ConfigError(
                f"{self.path} is not a journal of dspark, or its first line is damaged",
                "move it away, or add --overwrite to start over",
            )
        if self.torn_bytes:
            os.ftruncate(self._fd, good)
            self._end = good

    def _note(self, record: dict[str, Any], offset: int) -> None:
        kind = record["type"]
        if kind == "header":
            if record["format"] != FORMAT:
                raise ConfigError(
                    f"{self.path} has format {record['format']}, this dspark reads {FORMAT}",
                    "use the dspark that wrote it, or add --overwrite to start over",
                )
            self.header = record["run"]
            return
        if kind == "complete":
            self.complete = record["input"]
            return
        key = bytes.fromhex(record["key"])
        data = int(record["data_key"], 16)
        if kind == "data":
            at = self._at[key]
            self._data[at] = data
            self._newer_data[at] = offset
            return
        if kind == "row":
            self.has_completions = True
            row = record["row"]
            turns = row.get("turns", [row])  # one that was cut changes all that follow
            stopped = all(turn["finish_reason"] == "stop" for turn in turns)
            status = Status.STOP if stopped else Status.LENGTH
            tokens = max(int(turn["usage"]["completion_tokens"]) for turn in turns)
            limit = int(row["sampling"]["max_tokens"])
        elif kind == "error":
            too_long = record["error"]["class"] == "too_long"
            status = Status.TOO_LONG if too_long else Status.FAILED
            tokens = int(record.get("max_tokens", 0))
            limit = int(record.get("max_model_len", 0))
        else:
            raise ValueError(f"unknown record {kind!r}")
        at = len(self._offsets)
        self._offsets.append(offset)
        self._numbers.extend((status, tokens, limit))
        self._data.append(data)
        self._at[key] = at  # last: another thread may be looking it up

    def _entry(self, at: int) -> Entry:
        status, tokens, limit = self._numbers[3 * at : 3 * at + 3]
        newer = self._newer_data.get(at, -1)
        return Entry(self._offsets[at], Status(status), tokens, limit, self._data[at], newer)


_KEY = re.compile(rb'\{"type": "(?:row|error)", "key": "([0-9a-f]+)"')


def read_run(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """What a journal says of its run.

    Returns:
        Headers under which there are rows that still count, and the last one in any case; and
        `complete`.

    Raises:
        ConfigError: It cannot be read, or is no journal.
    """
    headers: list[dict[str, Any]] = []
    complete = None
    under: dict[str, int] = {}
    """Rows' keys: under which header the record lies that counts."""

    try:
        with path.open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    continue
                if line.startswith(b'{"type": "header"'):
                    run = loads(line)["run"]
                    if not headers or headers[-1] != run:
                        headers.append(run)
                elif line.startswith(b'{"type": "complete"'):
                    complete = loads(line)["input"]
                elif found := _KEY.match(line):
                    under[found[1].decode()] = len(headers) - 1
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (RequestError, KeyError) as error:
        raise ConfigError(f"{path} is not a journal of dspark: {error}") from None
    used = {*under.values(), len(headers) - 1}
    return [run for at, run in enumerate(headers) if at in used], complete


def data_key(data: Mapping[str, Any]) -> str:
    """16 hex digits naming a row's data fields."""
    return digest(data)[:16] if data else "0"


def _may_be_ours(fd: int) -> bool:
    """Whether a file without one whole line begins as a journal does."""
    begin = b'{"type": "header"'
    found = os.pread(fd, len(begin), 0)
    return begin.startswith(found)


def _open(path: Path | None) -> int:
    if path is None:
        with tempfile.TemporaryFile(prefix="dspark-") as stream:
            return os.dup(stream.fileno())
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "choose another -o") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"another run is writing {path}", "wait for it to end, or choose another -o"
        ) from None
    except OSError:
        pass  # a file system without locks; the user's discipline has to do
    return fd


def _write(fd: int, data: memoryview) -> int:
    """One write; its own function so that tests can fill the disk."""
    return os.write(fd, data)


def _disk_error(path: Path | None, error: OSError) -> DSparkError:
    where = "the temporary file" if path is None else str(path)
    return DSparkError(
        f"cannot write {where}: {error.strerror or error}",
        "free some space, then run the same command again: finished rows are kept",
    )
