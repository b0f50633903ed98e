"""The loop: rows in, requests to the engine, finished rows to the journal."""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dspark_cli.interrupt import Interrupts, StopNow
from dspark_cli.journal import Entry, Journal, Status, data_key, digest, row_key
from dspark_cli.output import Slots, StdoutRows, completion_row
from dspark_cli.progress import Counts
from dspark_cli.reader import RawRow, Rows
from dspark_cli.rows import (
    Prompt,
    RowRequest,
    RowRules,
    TextTokenizer,
    encode_prompt,
    read_id,
    read_row,
    turn_name,
)
from dspark_cli.sampling import effective
from engine.errors import DSparkError, RequestError
from engine.request import Completion, Request, RequestFailure, SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine


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

    def then(self, reply: Completion) -> "Pending":
        """The next turn."""
        prompt = self.prompt.then(reply.text)
        return replace(self, prompt=prompt, answered=(*self.answered, reply))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """What the job needs to know besides its parts."""

    rules: RowRules
    chat_template: str | None = None
    drafted: bool = False
    rerun: frozenset[str] = frozenset()
    max_model_len: int | None = None
    """As asked for; rows that were too long under another one get another look."""

    keep_results: bool = False
    keep_prompts: int = 0
    """Remember the text of this many prompts, to show them."""


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
        self._tokenizer = tokenizer
        self._settings = settings
        self._interrupts = interrupts
        self._all_read = False
        self._seen: set[bytes] = set()
        self._in_flight: dict[tuple[str, int], Pending] = {}
        self._ready: deque[Pending] = deque()
        """Second and later turns that can be asked now."""

    @property
    def complete(self) -> bool:
        """Whether every line of the output is known."""
        return self.exhausted and self.slots.filled == len(self.slots)

    def pending(self) -> Iterator[Pending]:
        """Read rows; yield what is not in the journal, record what cannot be served."""
        for raw in self._raw_rows():
            row_id: str | int | None = None
            try:
                fields = raw.load()
                own_id = read_id(fields)
                row_id = str(raw.index) if own_id is None else own_id
                self._claim(row_id)
                row = read_row(fields, self._settings.rules)
            except RequestError as error:
                self._reject_row(raw, row_id, error)
                self._flush_stdout()
                continue
            yield from self._samples(raw, row_id, row)
        self.exhausted = self._all_read

    def run(self, engine: "Engine", pending: Iterator[Pending]) -> None:
        """Complete all of `pending`.

        Raises:
            DSparkError: The engine lost a row, or the disk refuses.
            StopNow: The user wants out; the journal has what ended before.
        """
        self._interrupts.running = True
        for result in engine.run(self._requests(engine, pending)):
            with self._interrupts.shield():
                self._settle(result)
            self._flush_stdout()
        self._interrupts.rest()
        unfinished = list(self._in_flight.values())
        if not self._interrupts.draining:
            unfinished += self._ready
        if unfinished:
            raise DSparkError(
                f"the engine ended with {len(unfinished)} rows unfinished, "
                f"{str(unfinished[0].row_id)!r} first",
                "run the same command again: finished rows are kept",
            )

    def _raw_rows(self) -> Iterator[RawRow]:
        rows = iter(self._rows)
        while not self._interrupts.draining:
            try:
                with self._interrupts.waiting():
                    raw = next(rows, None)
            except StopNow:
                if self._interrupts.stopped:
                    raise
                return  # a first Ctrl-C while waiting for stdin
            if raw is None:
                self._all_read = True
                return
            yield raw

    def _claim(self, row_id: str | int) -> None:
        name = hashlib.blake2b(str(row_id).encode("utf-8"), digest_size=12).digest()
        if name in self._seen:
            raise RequestError(
                "duplicate_id", f"the id {row_id!r} was used by an earlier row", "make ids unique"
            )
        self._seen.add(name)

    def _samples(self, raw: RawRow, row_id: str | int, row: RowRequest) -> Iterator[Pending]:
        if self.counts.total is not None:
            self.counts.total += row.n - self._settings.rules.n
        identity, sampling = row.prompt.identity(), effective(row.params)
        for sample in range(row.n):
            slot = self.slots.open(raw, sample if row.n > 1 else None)
            if len(self.prompts) < self._settings.keep_prompts:
                self.prompts[slot] = row.prompt.brief()
            key = row_key(str(row_id), sample, identity, sampling)
            entry = self._journal.find(key)
            if entry is not None and self._stands(entry, row.params):
                self._keep(slot, key, entry, row.data)
            else:
                yield Pending(slot, row_id, sample, row.prompt, row.params, key, row.data)

    def _stands(self, entry: Entry, params: SamplingParams) -> bool:
        """Whether a recorded row is what a run with `params` would give."""
        rerun = self._settings.rerun
        if entry.status is Status.FAILED:
            return "failed" not in rerun
        if entry.status is Status.TOO_LONG:
            same = entry.limit == (self._settings.max_model_len or 0)
            # replies to earlier turns are part of the prompt: other limits make other lengths
            same &= entry.tokens in (0, params.max_tokens)
            return "failed" not in rerun and same
        if entry.status is Status.STOP:
            return entry.tokens <= params.max_tokens
        if "truncated" in rerun:
            return False
        by_context = entry.tokens < entry.limit
        return params.max_tokens == entry.limit or (
            by_context and entry.tokens <= params.max_tokens
        )

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

    def _requests(self, engine: "Engine", pending: Iterator[Pending]) -> Iterator[Request | None]:
        """Requests for the engine; None while only replies still to come can give more."""
        row: Prompt | None = None
        token_ids: tuple[int, ...] = ()
        while True:
            # later turns come before new rows: their prefix is in the KV cache
            item = self._ready.popleft() if self._ready else next(pending, None)
            if self._interrupts.draining:
                self.exhausted = False
                return
            if item is None:
                if any(going.prompt.later for going in self._in_flight.values()):
                    yield None
                    continue
                return
            try:
                if item.prompt is not row:  # samples of one row share their prompt
                    row = None
                    token_ids = encode_prompt(
                        item.prompt, self._tokenizer, self._settings.chat_template
                    )
                    row = item.prompt
                request_id, sample = item.name
                request = Request(
                    request_id=request_id,
                    prompt_token_ids=token_ids,
                    params=item.params,
                    sample_index=sample,
                )
                engine.validate(request)
            except RequestError as error:
                self._reject(item, error.kind, str(error), error.hint, retryable=False)
                self._flush_stdout()
                continue
            self._in_flight[item.name] = item
            self.counts.in_flight += 1
            yield request

    def _settle(self, result: Completion | RequestFailure) -> None:
        request = result.request
        item = self._in_flight.pop((request.request_id, request.sample_index), None)
        if item is None:
            raise DSparkError(f"the engine returned {request.request_id!r}, which it was not given")
        self.counts.in_flight -= 1
        if isinstance(result, RequestFailure):
            hint = "--rerun failed tries it again" if result.retryable else ""
            self._reject(item, result.kind, result.message, hint, retryable=result.retryable)
            return
        if item.prompt.later:
            self._ready.append(item.then(result))
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
        slot = self.slots.open(raw)
        key = digest(["row without a request", hashlib.sha256(raw.data or b"").hexdigest(), body])
        entry = self._journal.find(key)
        if entry is None:
            record = {"type": "error", "key": key, "data_key": "0", "error": body}
            self.slots.fill(slot, self._journal.append(record))
        else:
            self.slots.fill(slot, entry.offset)
        if self.counts.total is not None:
            self.counts.total += 1 - self._settings.rules.n
        self._count_failure(error.kind)

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
