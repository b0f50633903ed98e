"""The loop: rows in, requests to the engine, finished rows to the journal."""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from dspark_cli.front import Front
from dspark_cli.interrupt import Interrupts, StopNow
from dspark_cli.journal import Entry, Journal, Status, data_key, digest
from dspark_cli.output import Slots, StdoutRows, completion_row
from dspark_cli.prepare import Encoded, JobSettings, Prepared, Preparing
from dspark_cli.progress import Counts
from dspark_cli.readahead import NotYet, ReadAhead
from dspark_cli.reader import RawRow, Rows
from dspark_cli.rows import Prompt, RowRequest, TextTokenizer, turn_name
from engine.errors import DSparkError, RequestError
from engine.request import Completion, Request, RequestFailure, SamplingParams

_TURN_FIELDS = ("text", "token_ids", "finish_reason", "stop_reason", "usage", "spec")


@dataclass(frozen=True, slots=True)
class Pending:
    """One output line that is still to be made, at the turn it has come to."""

    slot: int
    row_id: str | int
    sample: int
    prompt: Prompt
    params: SamplingParams
    key: str
    data: dict[str, Any]
    encoded: Encoded
    """Of this turn."""

    answered: tuple[Completion, ...] = ()
    """The turns before this one."""

    @property
    def name(self) -> tuple[str, int]:
        """Request id and sample of this turn."""
        return turn_name(self.row_id, len(self.answered)), self.sample

    @property
    def at_turn(self) -> str:
        """Which turn, as the start of a message; nothing if there is only one."""
        turn = len(self.answered) + 1
        turns = turn + len(self.prompt.later)
        return f"turn {turn} of {turns}: " if turns > 1 else ""

    def then(self, reply: Completion, encode: Callable[[Prompt], Encoded]) -> "Pending":
        """The next turn."""
        prompt = self.prompt.then(reply.text)
        answered = (*self.answered, reply)
        return replace(self, prompt=prompt, encoded=encode(prompt), answered=answered)


@dataclass(slots=True)
class Tally:
    """Counts of this run's completions, for the summary and the metrics."""

    finish: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    acceptance_sum: float = 0.0
    acceptance_rows: int = 0

    def add(self, turns: Sequence[Completion]) -> None:
        """Count a line: the end of its last turn, the rounds of all."""
        self.finish[turns[-1].finish_reason.value] += 1
        rounds = [r for turn in turns for r in turn.rounds]
        if rounds:
            self.acceptance_sum += sum(r.committed for r in rounds) / len(rounds)
            self.acceptance_rows += 1


class Job:
    """One run over the rows.

    Args:
        rows: The input.
        journal: Where finished rows go.
        tokenizer: The target's.
        settings: See JobSettings.
        interrupts: Says when to stop.
        counts: Kept up to date for whoever shows them.
    """

    def __init__(
        self,
        rows: Rows,
        journal: Journal,
        tokenizer: TextTokenizer,
        settings: JobSettings,
        interrupts: Interrupts,
        counts: Counts,
    ) -> None:
        self.slots = Slots([source.name for source in rows.sources])
        self.counts = counts
        self.tally = Tally()
        self.stdout: StdoutRows | None = None
        """Gets lines in order as they end; None if they go to a file at the end."""
        self.results: list[Completion] = []
        self.prompts: dict[int, str] = {}
        """Prompts of the first slots, if they are to be shown."""
        self.exhausted = False
        """True once every row was looked at."""
        self._rows = rows
        self._journal = journal
        self._prepare = Preparing(journal, tokenizer, settings)
        self._settings = settings
        self._interrupts = interrupts
        self._ahead: ReadAhead[Prepared] | None = None
        self._turns = ThreadPoolExecutor(1, "dspark-turns")
        self._all_read = self._all_given = False
        self._seen: set[bytes] = set()
        self._in_flight: dict[tuple[str, int], Pending] = {}
        self._ready: deque[Future[Pending]] = deque()
        """Second and later turns that can be asked once they are tokenised."""

    @property
    def complete(self) -> bool:
        """Whether every line of the output is known."""
        return self.exhausted and self.slots.filled == len(self.slots)

    def pending(self) -> Iterator[Pending | None]:
        """Read rows; yield what is not in the journal, record what cannot be served.

        None means that the next row is not there yet, while rows that run need not wait for it.
        """
        for prepared in self._prepared():
            if prepared is None:
                yield None
                continue
            try:
                if prepared.row_id is not None:
                    self._claim(prepared.row_id)
                if isinstance(prepared.row, RequestError):
                    raise prepared.row
            except RequestError as error:
                self._reject_row(prepared.raw, prepared.row_id, error)
                self._flush_stdout()
                continue
            yield from self._samples(prepared, prepared.row)
        self.exhausted = self._all_read

    def close(self) -> None:
        """End the threads; again does nothing."""
        if self._ahead is not None:
            self._ahead.close()
        self._turns.shutdown(cancel_futures=True)

    def run(self, front: Front, pending: Iterator[Pending | None]) -> None:
        """Complete all of `pending`.

        Raises:
            DSparkError: The engine lost a row, or the disk refuses.
            StopNow: The user wants out; the journal has what ended before.
        """
        self._interrupts.running = True
        for result in front.run(self._requests(pending)):
            with self._interrupts.shield():
                self._settle(result)
            self._flush_stdout()
        self._interrupts.rest()
        unfinished = list(self._in_flight.values())
        if not self._interrupts.draining:
            unfinished += [turn.result() for turn in self._ready]
        if unfinished:
            raise DSparkError(
                f"the engine ended with {len(unfinished)} rows unfinished, "
                f"{str(unfinished[0].row_id)!r} first",
                "run the same command again: finished rows are kept",
            )

    def _prepared(self) -> Iterator[Prepared | None]:
        rows = self._rows
        ahead = self._ahead = ReadAhead(
            filter(None, map(self._prepare, rows)), lambda each: each.nbytes, rows.given_up
        )
        while not self._interrupts.draining:
            try:
                with self._interrupts.waiting():
                    found = ahead.get(wait=not self._in_flight)
            except StopNow:
                if self._interrupts.stopped:
                    raise
                return  # a first Ctrl-C while waiting for stdin
            except StopIteration:
                self._all_read = True
                if self.counts.total is not None:
                    self.counts.total = len(self.slots)
                return
            yield None if isinstance(found, NotYet) else found

    def _claim(self, row_id: str | int) -> None:
        name = hashlib.blake2b(str(row_id).encode("utf-8"), digest_size=12).digest()
        if name in self._seen:
            raise RequestError(
                "duplicate_id", f"the id {row_id!r} was used by an earlier row", "make ids unique"
            )
        self._seen.add(name)

    def _samples(self, prepared: Prepared, row: RowRequest) -> Iterator[Pending]:
        raw, row_id = prepared.raw, prepared.row_id
        assert row_id is not None, "a row with a request has an id"
        self._expect(raw, row.n)
        encoded = prepared.encoded
        for sample, key in enumerate(prepared.keys):
            slot = self.slots.open(raw, sample if row.n > 1 else None)
            if len(self.prompts) < self._settings.keep_prompts:
                self.prompts[slot] = row.prompt.brief()
            entry = self._prepare.find(key, row.params)
            if entry is not None:
                self._keep(slot, key, entry, row.data)
                continue
            if encoded is None:
                encoded = self._prepare.encode(row.prompt)
            yield Pending(slot, row_id, sample, row.prompt, row.params, key, row.data, encoded)

    def _keep(self, slot: int, key: str, entry: Entry, data: dict[str, Any]) -> None:
        newer = entry.data_offset
        if self._settings.rules.passthrough and int(data_key(data), 16) != entry.data:
            newer = self._journal.append(
                {"type": "data", "key": key, "data_key": data_key(data), "data": data}
            )
        self.slots.fill(slot, entry.offset, newer)
        if entry.status in (Status.FAILED, Status.TOO_LONG):
            self._count_failure(self._journal.read(entry.offset)["error"]["class"])
        else:
            self.counts.kept += 1
        self._flush_stdout()

    def _requests(self, pending: Iterator[Pending | None]) -> Iterator[Request | None]:
        """Requests for the engine; None while running rows need not wait for the next one."""
        while True:
            item = self._next(pending)
            if self._interrupts.draining:
                self.exhausted = False
                return
            if item is None:
                if self._all_given and not self._ready and not self._more_turns():
                    return
                yield None
                continue
            try:
                if isinstance(item.encoded, RequestError):
                    raise item.encoded
            except RequestError as error:
                self._reject(item, error.kind, str(error), error.hint, retryable=False)
                self._flush_stdout()
                continue
            request_id, sample = item.name
            self._in_flight[item.name] = item
            self.counts.in_flight += 1
            yield Request(
                request_id=request_id,
                prompt_token_ids=item.encoded,
                params=item.params,
                sample_index=sample,
            )

    def _next(self, pending: Iterator[Pending | None]) -> Pending | None:
        """What to ask next; None if there is nothing, or nothing yet while rows run."""
        if self._ready:
            # later turns come before new rows: their prefix is in the KV cache
            if self._in_flight and not self._ready[0].done():
                return None
            return self._ready.popleft().result()
        if not self._all_given:
            try:
                return next(pending)
            except StopIteration:
                self._all_given = True
        return None

    def _more_turns(self) -> bool:
        return any(going.prompt.later for going in self._in_flight.values())

    def _settle(self, result: Completion | RequestFailure) -> None:
        request = result.request
        item = self._in_flight.pop((request.request_id, request.sample_index), None)
        if item is None:
            raise DSparkError(f"the engine returned {request.request_id!r}, which it was not given")
        self.counts.in_flight -= 1
        if isinstance(result, RequestFailure):
            hint = "--rerun failed tries it again" if result.retryable else result.hint
            self._reject(item, result.kind, result.message, hint, retryable=result.retryable)
            return
        if item.prompt.later:
            self._ready.append(self._turns.submit(item.then, result, self._prepare.encode))
            return
        turns = (*item.answered, result)
        rows = [completion_row(turn, item.row_id, self._settings.drafted) for turn in turns]
        row = rows[-1]
        if len(rows) > 1:
            row["turns"] = [{name: turn[name] for name in _TURN_FIELDS} for turn in rows]
        record: dict[str, Any] = {"type": "row", "key": item.key, "data_key": data_key(item.data)}
        if item.data:
            record["data"] = item.data
        record["row"] = row
        self.slots.fill(item.slot, self._journal.append(record))
        self.counts.done += 1
        self.tally.add(turns)
        if self._settings.keep_results:
            self.results.extend(turns)

    def _reject(
        self, item: Pending, kind: str, message: str, hint: str, *, retryable: bool
    ) -> None:
        error = _error(item.row_id, kind, item.at_turn + message, hint, retryable)
        record: dict[str, Any] = {"type": "error", "key": item.key, "data_key": "0", "error": error}
        if kind == "too_long":
            record["max_model_len"] = self._settings.max_model_len or 0
            if item.answered:
                record["max_tokens"] = item.params.max_tokens
        self.slots.fill(item.slot, self._journal.append(record))
        self._count_failure(kind)

    def _reject_row(self, raw: RawRow, row_id: str | int | None, error: RequestError) -> None:
        """Record a row that gave no request: read again each run, written once."""
        body = _error(row_id, error.kind, str(error), error.hint, False)
        self._expect(raw, 1)
        slot = self.slots.open(raw)
        key = digest(["row without a request", hashlib.sha256(raw.data or b"").hexdigest(), body])
        entry = self._journal.find(key)
        if entry is None:
            record = {"type": "error", "key": key, "data_key": "0", "error": body}
            self.slots.fill(slot, self._journal.append(record))
        else:
            self.slots.fill(slot, entry.offset)
        self._count_failure(error.kind)

    def _expect(self, raw: RawRow, lines: int) -> None:
        """Correct the total: this row has `lines`, those after it as many as the options say."""
        if self.counts.total is None or self._rows.total is None:
            return
        left = max(self._rows.total - raw.index - 1, 0) * self._settings.rules.n
        shard = self._settings.shard
        if shard is not None:
            left = round(left / shard.count)
        self.counts.total = len(self.slots) + lines + left

    def _count_failure(self, kind: str) -> None:
        self.counts.failed += 1
        self.tally.errors[kind] += 1

    def _flush_stdout(self) -> None:
        if self.stdout is not None:
            self.stdout.flush()


def _error(
    row_id: str | int | None, kind: str, message: str, hint: str, retryable: bool
) -> dict[str, Any]:
    return {
        "id": row_id,
        "class": kind,
        "message": message,
        "hint": hint,
        "retryable": retryable,
    }
