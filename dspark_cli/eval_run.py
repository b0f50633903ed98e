"""Requests to the engine and outputs to a journal, so that a long evaluation loses nothing.

The journal is the one of `dspark generate`, with rounds and times added to its rows. A row's key
holds everything that decides its output and its acceptance (both checkpoints, dtype, device,
drafted or plain, prompt ids, sampling), so a row is kept exactly if it would come out the same.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dspark_cli import backend
from dspark_cli.eval_options import EvalOptions
from dspark_cli.fingerprint import changes, dspark_version, text_digest
from dspark_cli.interrupt import Interrupts, StopNow
from dspark_cli.journal import FORMAT, Journal, row_key
from dspark_cli.loading import load
from dspark_cli.output import completion_row
from dspark_cli.progress import Counts, Progress
from dspark_cli.sampling import effective
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.locate import checkpoint_digest
from engine.request import Completion, FinishReason, Request, RequestFailure, Round, Timing
from engine.telemetry import EngineStats
from evals.arm import DRAFTED, Arm
from evals.report import NAMES, check_out

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.text import Tokenizer

JOURNAL = "rows.journal"


class EvalRun:
    """An engine, a journal and a place for reports, for the time of one evaluation.

    Args:
        given: What decides the engine.
        out: The folder for reports.
        overwrite: Replace what an earlier run left there.
        what: What is evaluated, for the journal: a run with another one does not go on.
    """

    def __init__(
        self, given: EvalOptions, out: Path, overwrite: bool, what: Mapping[str, Any]
    ) -> None:
        self.given = given
        self.out = out
        self.config = given.engine_config()
        self.template = given.template_text()
        self.template_kwargs = given.template_kwargs()
        check_out(out, overwrite=overwrite or (out / JOURNAL).exists())
        self.folder = backend.locate_checkpoint(self.config.model, "target")
        draft = self.config.draft
        self.digests = {
            "model": checkpoint_digest(self.folder),
            "draft": None
            if draft is None
            else checkpoint_digest(backend.locate_checkpoint(draft, "draft")),
        }
        self._overwrite = overwrite
        self._what = dict(what)
        self._engine: Engine | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def tokenizer(self) -> "Tokenizer":
        """The target's."""
        if self._tokenizer is None:
            self._tokenizer = backend.load_tokenizer(self.folder)
        return self._tokenizer

    @property
    def engine(self) -> "Engine":
        """Loaded on first use."""
        if self._engine is None:
            self._engine = load(self.config, quiet=self.given.quiet, say=self.say)
        return self._engine

    @property
    def settings(self) -> dict[str, Any]:
        """All of it, for the manifest."""
        config = self._engine.config if self._engine is not None else self.config
        return {**self._what, "engine": asdict(config), "checkpoints": self.digests}

    def say(self, text: str) -> None:
        """To people."""
        if not self.given.quiet:
            sys.stderr.write(f"dspark: {text}\n")
            sys.stderr.flush()

    def arms(self, requests: Sequence[Request], names: Sequence[str]) -> dict[str, Arm]:
        """Run the same requests once for each arm.

        Args:
            requests: Their ids differ.
            names: `drafted`, `plain`.

        Raises:
            StopNow: The user wants out; what ended is in the journal.
            DSparkError: The engine or the disk fails.
        """
        with (
            Interrupts(self.given.grace, self.say) as interrupts,
            Journal(self.out / JOURNAL, restart=self._overwrite) as journal,
        ):
            self._open(journal)
            if self._overwrite:
                for name in NAMES:
                    (self.out / name).unlink(missing_ok=True)
            found = {name: self._arm(name, requests, journal, interrupts) for name in names}
        for arm in found.values():
            arm.check()
        return found

    def _open(self, journal: Journal) -> None:
        """Check whether the journal is of this evaluation; make it so if it is empty."""
        now = {**self._what, "version": dspark_version()}
        then = journal.header
        if then is None:
            journal.append({"type": "header", "format": FORMAT, "run": now})
            return
        differ = changes(then, now, tuple(self._what))
        if differ and journal.has_completions:
            raise ConfigError(
                f"{self.out} holds another evaluation: " + "; ".join(map(str, differ)),
                "choose another --out, or add --overwrite to start over",
            )

    def _arm(
        self, name: str, requests: Sequence[Request], journal: Journal, interrupts: Interrupts
    ) -> Arm:
        keys = {r.request_id: self._key(name, r) for r in requests}
        done: dict[str, Completion] = {}
        failed: dict[str, str] = {}
        for request in requests:
            entry = journal.find(keys[request.request_id])
            if entry is not None:
                done[request.request_id] = restored(request, journal.read(entry.offset)["row"])
        left = [r for r in requests if r.request_id not in done]
        resumed, tokens, begin = len(done), 0, time.perf_counter()
        if resumed:
            self.say(f"{name}: {resumed} of {len(requests)} rows are in {journal.path}")
        if left:
            engine = self.engine
            counts = Counts(total=len(requests), kept=resumed)
            begin = time.perf_counter()
            with self._progress(counts, journal, engine):
                for result in self._decode(name, left, failed, counts, interrupts):
                    row_id = result.request.request_id
                    with interrupts.shield():
                        if isinstance(result, RequestFailure):
                            failed[row_id] = f"{result.kind}: {result.message}"
                            counts.failed += 1
                        else:
                            done[row_id] = result
                            tokens += len(result.token_ids)
                            journal.append(_record(keys[row_id], result, name == DRAFTED))
                            counts.done += 1
            interrupts.rest()
            if interrupts.draining:
                raise StopNow
        return Arm(
            name=name,
            done={r.request_id: done[r.request_id] for r in requests if r.request_id in done},
            failed=failed,
            seconds=time.perf_counter() - begin,
            fresh_tokens=tokens,
            resumed=resumed,
        )

    def _progress(self, counts: Counts, journal: Journal, engine: "Engine") -> Progress:
        return Progress(
            counts,
            cast(EngineStats, _Since(engine.stats)),
            quiet=self.given.quiet,
            file=self.given.progress_file,
            tick=journal.sync_if_due,
        )

    def _decode(
        self,
        name: str,
        left: Sequence[Request],
        failed: dict[str, str],
        counts: Counts,
        interrupts: Interrupts,
    ) -> Iterator[Completion | RequestFailure]:
        engine = self.engine
        interrupts.running = True

        def source() -> Iterator[Request]:
            for request in left:
                if interrupts.draining:
                    return
                try:
                    engine.validate(request)
                except RequestError as error:
                    failed[request.request_id] = f"{error.kind}: {error}"
                    counts.failed += 1
                    continue
                counts.in_flight += 1
                yield request

        for result in engine.run(source(), speculate=name == DRAFTED):
            counts.in_flight -= 1
            yield result

    def _key(self, name: str, request: Request) -> str:
        config, drafted = self.config, name == DRAFTED
        decides = {
            **effective(request.params),
            # another limit gives another score, so a cut row is not reused under a larger one
            "limit": request.params.max_tokens,
            "arm": name,
            "model": self.digests["model"],
            "draft": self.digests["draft"] if drafted else None,
            "num_speculative_tokens": config.num_speculative_tokens if drafted else None,
            "verify": config.verify if drafted else None,
            "dtype": config.dtype,
            "device": config.device,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
        }
        ids = text_digest(repr(request.prompt_token_ids))
        return row_key(request.request_id, request.sample_index, ids, decides)


class _Since:
    """An engine's counters as of now, less what was counted before: another arm is not in them."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._then = replace(stats)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)

    @property
    def output_tokens(self) -> int:
        return self._stats.output_tokens - self._then.output_tokens

    @property
    def rounds(self) -> int:
        return self._stats.rounds - self._then.rounds

    @property
    def out_of_memory(self) -> int:
        return self._stats.out_of_memory - self._then.out_of_memory

    @property
    def acceptance_length(self) -> float:
        return (self._stats.committed - self._then.committed) / max(self.rounds, 1)


def _record(key: str, done: Completion, drafted: bool) -> dict[str, Any]:
    row = completion_row(done, done.request.request_id, drafted)
    row["num_cached_tokens"] = done.num_cached_tokens
    row["rounds"] = [[r.drafted, r.accepted, r.committed] for r in done.rounds]
    row["timing"] = {"admitted": done.timing.admitted, "commits": list(done.timing.commits)}
    return {"type": "row", "key": key, "data_key": "0", "row": row}


def restored(request: Request, row: Mapping[str, Any]) -> Completion:
    """A completion out of the journal, for the request that it answered."""
    timing = row["timing"]
    return Completion(
        request=request,
        token_ids=tuple(row["token_ids"]),
        text=row["text"],
        finish_reason=FinishReason(row["finish_reason"]),
        stop_reason=row["stop_reason"],
        num_cached_tokens=row["num_cached_tokens"],
        rounds=tuple(Round(*numbers) for numbers in row["rounds"]),
        timing=Timing(timing["admitted"], tuple((at, n) for at, n in timing["commits"])),
    )


def drafted_arms(config: EngineConfig, compare_plain: bool) -> list[str]:
    """Which passes to make.

    Raises:
        ConfigError: There is nothing to compare with.
    """
    if config.draft is None:
        if compare_plain:
            raise ConfigError("--compare-plain needs a drafter to compare with", "give --draft")
        return ["plain"]
    return ["drafted", "plain"] if compare_plain else ["drafted"]
