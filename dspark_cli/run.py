"""One `dspark generate` from checks to summary."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from dspark_cli import backend
from dspark_cli.cluster_plan import import_ray
from dspark_cli.compare import Comparison, compare_plain
from dspark_cli.dryrun import Bounds, examine, print_report
from dspark_cli.front import Front, Single
from dspark_cli.header import Header, run_header
from dspark_cli.interrupt import Interrupts, StopNow
from dspark_cli.job import Job, Pending
from dspark_cli.journal import Journal, Status
from dspark_cli.loading import load
from dspark_cli.metrics import counted, manifest_of, run_metrics, write_metrics
from dspark_cli.output import OutputPaths, StdoutRows, first_completions, write_final
from dspark_cli.parts import share_out
from dspark_cli.preflight import check_places, check_space
from dspark_cli.prepare import JobSettings
from dspark_cli.progress import Counts, LoadProgress, Progress
from dspark_cli.reader import Rows, open_sources
from dspark_cli.settings import GenerateOptions
from dspark_cli.startup import Startup, process_started
from dspark_cli.summary import interrupted, summary
from dspark_cli.trace import Trace
from engine.config import EngineConfig
from engine.errors import ConfigError, DSparkError, describe_error
from engine.telemetry import EngineStats

if TYPE_CHECKING:
    from engine.engine import Engine

FAILED_ROWS = 3
INTERRUPTED = 130


class GenerateRun:
    """The command, once its options are known to agree.

    Args:
        given: The options.

    Raises:
        ConfigError: An option is out of range, the input or output will not do, or this host has
            no room for so many engines.
    """

    def __init__(self, given: GenerateOptions) -> None:
        self.given = given
        self.config = given.engine_config()
        self.rules = given.rules()
        self.template = given.template_text()
        if given.cluster is None and given.data_parallel_size not in (None, 1):
            share_out(self.config, given.data_parallel_size)  # refuses more than fit
        self.paths = OutputPaths.of(given.output or "-", given.shard)
        self.reports = given.report_paths()
        self.rows = Rows(open_sources(given.input), given.limit)
        self.stats = EngineStats()
        self.engines: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.written = False

    def say(self, text: str) -> None:
        """To people."""
        if not self.given.quiet:
            sys.stderr.write(f"dspark: {text}\n")
            sys.stderr.flush()

    def dry_run(self) -> int:
        """Report on the input; the exit code."""
        if self.given.cluster is not None:
            import_ray(self.given.cluster)
        backend.check_checkpoints(self.config)
        folder = backend.locate_checkpoint(self.config.model, "target")
        tokenizer = backend.load_tokenizer(folder)
        bounds = Bounds.of(folder, self.config.max_model_len)
        bounds.check_stop_tokens(self.rules.params.stop_token_ids)
        report = examine(self.rows, self.rules, tokenizer, self.template, bounds, self.given.shard)
        print_report(report)
        return FAILED_ROWS if report.errors else 0

    def run(self) -> int:
        """Do it; the exit code."""
        given = self.given
        check_places(self.paths, given.input, self.rows.sources, self.reports.all)
        self._check_existing()
        total = self.rows.count()
        lines = None if total is None else total * self.rules.n
        if lines is not None and given.shard is not None:
            lines = round(lines / given.shard.count)
        if self.paths.rows is not None:
            warning = check_space(self.paths.rows.parent, lines, self.rules.params.max_tokens)
            if warning is not None:
                self.say(warning)
        folder = backend.locate_checkpoint(self.config.model, "target")
        Bounds.of(folder, None).check_stop_tokens(self.rules.params.stop_token_ids)
        tokenizer = backend.load_tokenizer(folder)
        now = run_header(
            self.config, self.rules, self.template, given.shard, folder, tokenizer.fingerprint()
        )
        counts = Counts(total=lines)
        job: Job | None = None
        with (
            Interrupts(given.grace, self.say) as interrupts,
            Journal(self.paths.journal, restart=given.overwrite) as journal,
        ):
            try:
                header = Header(journal, given.force_resume, self.say)
                header.open(now)
                settings = JobSettings(
                    rules=self.rules,
                    chat_template=self.template,
                    drafted=self.config.draft is not None,
                    rerun=frozenset(choice.value for choice in given.rerun or ()),
                    max_model_len=self.config.max_model_len,
                    shard=given.shard,
                    keep_results=given.compare_plain,
                    keep_prompts=given.show,
                )
                job = Job(self.rows, journal, tokenizer, settings, interrupts, counts)
                with closing(job):
                    return self._work(job, journal, header)
            except StopNow:
                self.say(interrupted(counts, journal, self.paths.rows, self.written))
                if job is not None:
                    self._write_metrics(job, journal, phase="interrupted")
                return INTERRUPTED
            except DSparkError as error:  # what was finished counts all the same
                if job is not None and self.engines:
                    with suppress(DSparkError):  # the first error is the one to tell
                        self._write_metrics(job, journal, phase="failed", error=error)
                if job is not None and self.paths.journal is not None:
                    _say_what_is_kept(error, job.counts)
                raise

    def _work(self, job: Job, journal: Journal, header: Header) -> int:
        if self.paths.rows is None:
            job.stdout = StdoutRows(job.slots, journal, self.rules.passthrough)
        pending = job.pending()
        first = next(pending, None)
        if first is not None:
            self._decode(job, header, chain([first], pending))
        if not job.complete:
            raise StopNow
        if self.rows.read == 0:
            raise ConfigError(f"no rows in {self.given.input}", "write one JSON object a line")
        if self.paths.rows is not None:
            journal.sync()
            write_final(self.paths, job.slots, journal, self.rules.passthrough)
            self.written = True
            self._close_shard(job, journal)
            self._tell_left_out(job, journal)
        for text in summary(job, self.stats, self.seconds, self.paths):
            self.say(text)
        for slot, line in first_completions(job.slots, journal, self.given.show):
            self._show(line, job.prompts.get(slot))
        comparison, metrics = self._compare(job), self.reports.metrics
        if first is None and metrics is not None and metrics.exists():
            self.say(f"nothing was decoded: {metrics} is left as it is")
        else:
            self._write_metrics(job, journal, comparison)
        return FAILED_ROWS if job.counts.failed else 0

    def _write_metrics(
        self,
        job: Job,
        journal: Journal,
        comparison: Comparison | None = None,
        phase: str = "done",
        error: DSparkError | None = None,
    ) -> None:
        if self.reports.metrics is None:
            return
        ran = self.engines[0]["settings"] if self.engines else {}
        manifest = manifest_of({**(journal.header or {}), **ran}, self.rows, self.engines)
        rows = counted(job)
        metrics = run_metrics(
            rows,
            job.tally,
            self.stats,
            self.seconds,
            manifest,
            comparison,
            phase,
            # of a cluster engines come and go
            engine_seconds=None if self.given.cluster is None else 0.0,
        )
        if error is not None:
            metrics["error"] = describe_error(error)
        write_metrics(self.reports.metrics, metrics)

    def _close_shard(self, job: Job, journal: Journal) -> None:
        """Say for `dspark merge` what this shard's files are made of."""
        if self.given.shard is None:
            return
        found = {
            "rows_read": self.rows.read,
            "sha256": self.rows.sha256,
            "lines": len(job.slots),
            # what a resumed run may change, but not one shard of several
            "max_tokens": self.rules.params.max_tokens,
            "n": self.rules.n,
            "passthrough": self.rules.passthrough,
        }
        if journal.complete != found:
            journal.append({"type": "complete", "input": found})

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

    def _decode(self, job: Job, header: Header, pending: Iterator[Pending | None]) -> None:
        front = self._open_front(job.counts)
        with closing(front):
            header.settle(front.engines[0]["settings"])
            self.stats, self.engines = front.stats, front.engines
            alone = isinstance(front, Single)
            startup = Startup(front.stats, process_started()) if alone else None
            started = time.perf_counter()
            try:
                with (
                    Trace(self.reports.trace) as trace,
                    Progress(
                        job.counts,
                        front.stats,
                        quiet=self.given.quiet,
                        file=self.reports.progress,
                        tick=header.journal.sync_if_due,
                        startup=startup,
                    ),
                ):
                    if isinstance(front, Single):
                        front.follow(trace.add)
                    job.run(front, pending)
            finally:
                self.seconds = time.perf_counter() - started
                self.engines = front.engines  # some may have come later

    def _open_front(self, counts: Counts) -> Front:
        """What completes the rows.

        Args:
            counts: How many there are, if that is known, and what became of them so far.
        """
        count, address = self.given.data_parallel_size, self.given.cluster
        if address is not None:
            from dspark_cli.cluster import Cluster

            return Cluster(self.config, address, count, say=self.say)
        if count is None or count == 1:
            return Single(self._load(self.config, counts.total))
        from dspark_cli.replicas import Replicas

        progress = LoadProgress(self.given.quiet)
        try:
            front = Replicas(self.config, count, counts, say=self.say, on_progress=progress)
        finally:
            progress.close()
        self.say(f"{count} engines are ready")
        if account := front.engines[0].get("kv_cache"):
            self.say(f"KV cache of the first: {account}")
        return front

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


def _say_what_is_kept(error: DSparkError, counts: Counts) -> None:
    """Let the hint of a run that ended in the middle say how to go on."""
    kept = "finished rows are kept"
    if error.exit_code == 1 and counts.done + counts.kept and kept not in error.hint:
        again = f"{kept}: run the same command again"
        error.hint = f"{error.hint}; {again}" if error.hint else again
