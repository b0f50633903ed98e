"""One `dspark generate` from checks to summary."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cli import backend
from dspark_cli.compare import Comparison, compare_plain
from dspark_cli.dryrun import context_length, examine, print_report
from dspark_cli.fingerprint import check_same_run, dspark_version, text_digest
from dspark_cli.interrupt import Interrupts, StopNow
from dspark_cli.job import Job, Pending
from dspark_cli.journal import FORMAT, Journal, Status
from dspark_cli.loading import load
from dspark_cli.metrics import ran, run_metrics, write_metrics
from dspark_cli.output import OutputPaths, StdoutRows, first_completions, write_final
from dspark_cli.preflight import check_places, check_space
from dspark_cli.prepare import JobSettings
from dspark_cli.progress import Counts, Progress, clock
from dspark_cli.reader import Rows, open_sources
from dspark_cli.sampling import effective
from dspark_cli.settings import GenerateOptions
from dspark_cli.startup import Startup, process_started
from dspark_cli.trace import Trace
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.locate import checkpoint_digest
from engine.telemetry import EngineStats

if TYPE_CHECKING:
    from engine.engine import Engine

FAILED_ROWS = 3
INTERRUPTED = 130
_LATE = ("dtype", "device")  # `auto` until the engine is there


class GenerateRun:
    """The command, once its options are known to agree.

    Args:
        given: The options.

    Raises:
        ConfigError: An option is out of range, or the input or output will not do.
    """

    def __init__(self, given: GenerateOptions) -> None:
        self.given = given
        self.config = given.engine_config()
        self.rules = given.rules()
        self.template = given.template_text()
        self.paths = OutputPaths.of(given.output or "-")
        self.rows = Rows(open_sources(given.input), given.limit)
        self.stats = EngineStats()
        self.ran: dict[str, Any] = {}
        self.seconds = 0.0
        self.written = False

    def say(self, text: str) -> None:
        """To people."""
        if not self.given.quiet:
            sys.stderr.write(f"dspark: {text}\n")
            sys.stderr.flush()

    def dry_run(self) -> int:
        """Report on the input; the exit code."""
        backend.check_checkpoints(self.config)
        folder = backend.locate_checkpoint(self.config.model, "target")
        tokenizer = backend.load_tokenizer(folder)
        limit = context_length(folder, self.config.max_model_len)
        report = examine(self.rows, self.rules, tokenizer, self.template, limit)
        print_report(report)
        return FAILED_ROWS if report.errors else 0

    def run(self) -> int:
        """Do it; the exit code."""
        given = self.given
        asked = (given.metrics_json, given.progress_file, given.trace)
        reports = [path for path in asked if path is not None]
        check_places(self.paths, given.input, self.rows.sources, reports)
        self._check_existing()
        total = self.rows.count()
        lines = None if total is None else total * self.rules.n
        if self.paths.rows is not None:
            warning = check_space(self.paths.rows.parent, lines, self.rules.params.max_tokens)
            if warning is not None:
                self.say(warning)
        folder = backend.locate_checkpoint(self.config.model, "target")
        tokenizer = backend.load_tokenizer(folder)
        header = self._header(folder, tokenizer.fingerprint())
        counts = Counts(total=lines)
        job: Job | None = None
        with (
            Interrupts(given.grace, self.say) as interrupts,
            Journal(self.paths.journal, restart=given.overwrite) as journal,
        ):
            try:
                self._open_header(journal, header)
                settings = JobSettings(
                    rules=self.rules,
                    chat_template=self.template,
                    drafted=self.config.draft is not None,
                    rerun=frozenset(choice.value for choice in given.rerun or ()),
                    max_model_len=self.config.max_model_len,
                    keep_results=given.compare_plain,
                    keep_prompts=given.show,
                )
                job = Job(self.rows, journal, tokenizer, settings, interrupts, counts)
                with closing(job):
                    return self._work(job, journal)
            except StopNow:
                code = self._interrupted(counts, journal)
                if job is not None:
                    self._write_metrics(job, journal, phase="interrupted")
                return code

    def _work(self, job: Job, journal: Journal) -> int:
        if self.paths.rows is None:
            job.stdout = StdoutRows(job.slots, journal, self.rules.passthrough)
        pending = job.pending()
        first = next(pending, None)
        if first is not None:
            self._decode(job, journal, chain([first], pending))
        if not job.complete:
            raise StopNow
        if self.rows.read == 0:
            raise ConfigError(f"no rows in {self.given.input}", "write one JSON object a line")
        if self.paths.rows is not None:
            journal.sync()
            write_final(self.paths, job.slots, journal, self.rules.passthrough)
            self.written = True
            self._tell_left_out(job, journal)
        self._summary(job)
        for slot, line in first_completions(job.slots, journal, self.given.show):
            self._show(line, job.prompts.get(slot))
        self._write_metrics(job, journal, self._compare(job))
        return FAILED_ROWS if job.counts.failed else 0

    def _write_metrics(
        self,
        job: Job,
        journal: Journal,
        comparison: Comparison | None = None,
        phase: str = "done",
    ) -> None:
        if self.given.metrics_json is None:
            return
        settings = {**(journal.header or {}), **self.ran}
        metrics = run_metrics(job, self.rows, self.stats, settings, self.seconds, comparison, phase)
        write_metrics(self.given.metrics_json, metrics)

    def _tell_left_out(self, job: Job, journal: Journal) -> None:
        """A smaller --limit makes OUT smaller: say so."""
        if self.given.limit is None or self.rows.read < self.given.limit:
            return
        finished = sum(e.status in (Status.STOP, Status.LENGTH) for e in journal.entries())
        left = finished - job.counts.kept - job.counts.done
        if left > 0:
            self.say(
                f"{left} finished lines of earlier runs are left out of {self.paths.rows} (--limit "
                f"{self.given.limit}); {journal.path} keeps them"
            )

    def _decode(self, job: Job, journal: Journal, pending: Iterator[Pending | None]) -> None:
        engine = self._load(self.config, job.counts.total)
        startup = Startup(engine.stats, process_started())
        self._settle_header(journal, engine.config)
        self.stats = engine.stats
        self.ran = ran(engine)
        started = time.perf_counter()
        try:
            with (
                Trace(self.given.trace) as trace,
                Progress(
                    job.counts,
                    engine.stats,
                    quiet=self.given.quiet,
                    file=self.given.progress_file,
                    tick=journal.sync_if_due,
                    startup=startup,
                ),
            ):
                engine.follow(trace.add)
                job.run(engine, pending)
        finally:
            self.seconds = time.perf_counter() - started

    def _load(self, config: EngineConfig, rows: int | None = None) -> "Engine":
        return load(config, quiet=self.given.quiet, say=self.say, rows=rows)

    def _check_existing(self) -> None:
        """Refuse to lose what an earlier run wrote."""
        rows, journal = self.paths.rows, self.paths.journal
        if rows is None or journal is None or self.given.overwrite:
            return
        begun = journal.exists() and journal.stat().st_size > 0
        if not self.given.resume and (begun or rows.exists()):
            raise ConfigError(
                f"--no-resume would replace {journal if begun else rows}",
                "add --overwrite, or choose another -o",
            )
        if rows.exists() and not begun:
            raise ConfigError(
                f"{rows} exists, and there is no {journal.name} that tells how it was made",
                "choose another -o, or add --overwrite to replace it",
            )
        if self.given.rerun and not begun:
            raise ConfigError(f"there is no {journal} to --rerun rows of", "drop --rerun")

    def _header(self, folder: Path, tokenizer: str) -> dict[str, Any]:
        """What this run is, as far as it is known before the engine is loaded."""
        draft = self.config.draft
        draft_folder = None if draft is None else backend.locate_checkpoint(draft, "draft")
        sampling = effective(self.rules.params)
        del sampling["max_tokens"]  # a larger limit only redoes rows that were cut
        return {
            "model": checkpoint_digest(folder),
            "model_name": self.config.model,
            "tokenizer": tokenizer,
            "draft": None if draft_folder is None else checkpoint_digest(draft_folder),
            "draft_name": draft,
            "num_speculative_tokens": self.config.num_speculative_tokens,
            "verify": self.config.verify,
            "dtype": self.config.dtype,
            "device": self.config.device,
            "chat": self.rules.chat,
            "chat_template": text_digest(self.template),
            "chat_template_kwargs": dict(self.rules.template_kwargs),
            **sampling,
            "max_model_len": self.config.max_model_len,
            "max_num_seqs": self.config.max_num_seqs,
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
            "enable_prefix_caching": self.config.enable_prefix_caching,
            "version": dspark_version(),
        }

    def _open_header(self, journal: Journal, now: dict[str, Any]) -> None:
        """Check the journal's run against this one, and note what changed."""
        then = journal.header
        if journal.torn_bytes:
            self.say(
                f"the journal's last line was cut short ({journal.torn_bytes} bytes): its row runs "
                "again"
            )
        if journal.bad_lines:
            numbers = ", ".join(map(str, journal.bad_lines[:20]))
            self.say(f"{len(journal.bad_lines)} damaged lines in the journal: {numbers}")
        if then is not None and journal.has_completions:
            late = tuple(name for name in _LATE if now[name] == "auto")
            for note in check_same_run(then, now, force=self.given.force_resume, skip=late):
                self.say(note)
            now = {**now, **{name: then[name] for name in late}}
            if len(journal):
                self.say(f"going on: {len(journal)} lines are in {journal.path}")
        self._write_header(journal, now)

    def _settle_header(self, journal: Journal, config: EngineConfig) -> None:
        """Fill in what `auto` became."""
        then = journal.header
        if then is None:
            raise ValueError("a journal begins with its header")
        found: dict[str, Any] = {"dtype": config.dtype, "device": config.device}
        now = {**then, **{name: value for name, value in found.items() if value != "auto"}}
        new = tuple(name for name in _LATE if then[name] == "auto")
        if journal.has_completions:
            for note in check_same_run(then, now, force=self.given.force_resume, skip=new):
                self.say(note)
        self._write_header(journal, now)

    def _write_header(self, journal: Journal, run: dict[str, Any]) -> None:
        if journal.header != run:
            journal.append({"type": "header", "format": FORMAT, "run": run})

    def _interrupted(self, counts: Counts, journal: Journal) -> int:
        of = "" if counts.total is None else f" of {counts.total}"
        has = "" if counts.total is None else f" (the input asks for {counts.total})"
        recorded = len(journal)
        if self.paths.rows is None:
            self.say(f"interrupted after {counts.settled}{of} lines")
        elif self.written:
            self.say(f"interrupted after {self.paths.rows} was written")
        elif recorded > counts.settled:  # rows of earlier runs, not all looked at yet
            self.say(
                f"interrupted: {recorded} lines of this and earlier runs are kept in "
                f"{journal.path}{has}; run the same command again "
                f"to go on ({self.paths.rows} is written at the end)"
            )
        else:
            self.say(
                f"interrupted: {counts.settled}{of} lines are done and kept in {journal.path}; run "
                f"the same command again to go on ({self.paths.rows} is written at the end)"
            )
        return INTERRUPTED

    def _summary(self, job: Job) -> None:
        counts, stats = job.counts, self.stats
        if counts.done:
            speed = stats.output_tokens / max(self.seconds, 1e-9)
            text = f"{counts.done} lines in {clock(self.seconds)}, {stats.output_tokens} tokens, "
            text += f"{speed:.1f} tokens/s"
            if stats.rounds:
                text += f", acceptance length {stats.acceptance_length:.2f}"
            self.say(text)
        elif counts.kept:
            self.say("nothing left to do")
        if counts.kept:
            self.say(f"{counts.kept} lines were done before")
        if stats.out_of_memory:
            self.say(
                f"{stats.out_of_memory} steps ran out of memory; at most {stats.max_num_seqs} "
                f"requests at once fitted in the end"
            )
        cut = job.tally.finish["length"]
        if cut:
            self.say(f"{cut} of {counts.done} were cut at the limit (finish_reason length)")
        if counts.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in job.tally.errors.most_common())
            self.say(f"{counts.failed} lines failed ({kinds}): see {self.paths.errors or 'stdout'}")
        if self.paths.rows is not None:
            self.say(f"wrote {self.paths.rows}")

    def _show(self, line: dict[str, Any], prompt: str | None) -> None:
        spec = line["spec"]
        length = f", acceptance length {spec['acceptance_length']}" if spec else ""
        tokens = line["usage"]["completion_tokens"]
        head = f"--- {line['id']} ({tokens} tokens, {line['finish_reason']}{length})"
        asked = [] if prompt is None else [f"> {part}" for part in prompt.strip().split("\n")]
        sys.stderr.write("\n".join(["", head, *asked, line["text"].strip(), ""]))

    def _compare(self, job: Job) -> Comparison | None:
        if not self.given.compare_plain:
            return None
        if not job.results:
            self.say("nothing to compare: no row was decoded in this run (--overwrite starts over)")
            return None
        gc.collect()  # the drafted engine is gone by now; its memory, too
        comparison = compare_plain(job.results, self.seconds, self.config, self._load)
        for line in comparison.lines():
            sys.stderr.write(line + "\n")
        return comparison
