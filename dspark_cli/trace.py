"""--trace: every round as an event that Chrome's tracing page and Perfetto open."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from engine.errors import DSparkError
from engine.telemetry import RoundRecord


class Trace:
    """Writes events as rounds end; what a killed run leaves opens, too.

    Rounds overlap where the host prepares one while the one before it runs: they take turns on two
    lanes. A round's bar begins when the host begins to decide it and ends when its result is there.

    Args:
        path: The file; None writes nothing.

    Raises:
        DSparkError: It cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._stream: IO[str] | None = None
        self._first: float | None = None
        if path is None:
            return
        try:
            self._stream = path.open("w", encoding="utf-8")
        except OSError as error:
            raise DSparkError(
                f"cannot write {path}: {error.strerror}", "choose another --trace"
            ) from None
        self._stream.write("[\n")
        self._event(ph="M", name="process_name", args={"name": "dspark"})
        for lane, name in enumerate(("even rounds", "odd rounds")):
            self._event(ph="M", name="thread_name", tid=lane, args={"name": name})

    def __enter__(self) -> Self:
        """Nothing to do."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the file."""
        if self._stream is not None:
            self._stream.write(json.dumps({"ph": "M", "name": "end", "pid": os.getpid()}) + "\n]\n")
            self._stream.close()

    def add(self, record: RoundRecord) -> None:
        """A round has ended."""
        if self._stream is None:
            return
        if self._first is None:
            self._first = record.begin
        begin, end = self._at(record.begin), self._at(record.end)
        scheduled = record.requests + record.budget
        self._event(
            ph="X",
            name=record.path,
            cat="round",
            tid=record.number % 2,
            ts=begin,
            dur=round(end - begin, 1),
            args={
                "round": record.number,
                "requests": record.requests,
                "slots": record.slots,
                "budget": record.budget,
                "scheduled tokens": scheduled,
                "tier": record.tokens,
                "padding": record.tokens - scheduled,
                "predicted tokens": round(record.predicted, 2),
                "committed tokens": record.committed,
                "launched after us": round(self._at(record.launched) - begin, 1),
            },
        )
        padding = record.tokens - scheduled
        self._counter("target tokens", begin, scheduled=scheduled, padding=padding)
        self._counter("requests", begin, requests=record.requests)
        self._counter("budget a request", begin, drafts=record.budget / record.requests)
        self._counter("tokens a round", begin, committed=record.committed)

    def _counter(self, name: str, ts: float, **values: float) -> None:
        self._event(ph="C", name=name, ts=ts, args=values)

    def _at(self, seconds: float) -> float:
        """Microseconds since the first round."""
        return round(1e6 * (seconds - (self._first or 0.0)), 1)

    def _event(self, **fields: Any) -> None:
        assert self._stream is not None
        self._stream.write(json.dumps({"pid": os.getpid(), "tid": 0, **fields}) + ",\n")
