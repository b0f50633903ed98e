"""All options of `dspark generate` in one place."""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dspark_cli import options
from dspark_cli.engine_options import EngineOptions, Model
from dspark_cli.options import IN_OUT, MEMORY, REPORT, RUN, SAMPLING, SPECULATION, option
from dspark_cli.parsers import whole
from dspark_cli.prompt_options import Chat, PromptOptions
from dspark_cli.rows import RowRules
from dspark_cli.sampling_options import MaxTokens, SamplingOptions
from dspark_cli.sharding import Shard
from engine.errors import ConfigError


class Rerun(StrEnum):
    """Finished rows to make again."""

    failed = "failed"
    truncated = "truncated"


Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Rows: a JSONL file (.gz too), a folder or glob of them, parquet, the same as "
        "s3://BUCKET/KEY or gs://BUCKET/KEY, - for stdin, or a Hugging Face data set as "
        "NAME/NAME[@CONFIG][:SPLIT]. Any number of rows: they stream.",
    ),
]
Output = Annotated[
    str | None,
    option(
        IN_OUT,
        "JSONL to write, in input order, when all rows are done; - writes to stdout as rows end. "
        "Failed rows go to OUT.errors.jsonl.",
        "--output",
        "-o",
        metavar="OUT",
    ),
]
Passthrough = Annotated[
    bool,
    option(
        IN_OUT,
        "Other fields of a row are data: carry them to the output's `input`.",
        "--passthrough",
    ),
]
DryRun = Annotated[
    bool,
    option(
        IN_OUT,
        "Read, check and tokenize all rows, print counts and the first prompt; load no weights, "
        "write nothing.",
        "--dry-run",
    ),
]
ComparePlain = Annotated[
    bool,
    option(
        SPECULATION,
        "Afterwards decode the same rows without the drafter and print both speeds (keeps the rows "
        "in memory; use --limit).",
        "--compare-plain",
    ),
]
N = Annotated[
    int,
    option(
        SAMPLING, "Completions per row, a line each.", "--n", parser=whole(1, 1024), metavar="N"
    ),
]
ClusterAddress = Annotated[
    str | None,
    option(
        RUN,
        "Complete the rows on a Ray cluster: its address (HOST:PORT), auto for the one this host "
        "is part of, or local for one of this host that ends with the run. Needs the extra "
        "`cluster`.",
        "--cluster",
        metavar="ADDRESS",
    ),
]
ShardOf = Annotated[
    Shard | None,
    option(
        RUN,
        "Complete only the I-th of N parts of INPUT, split by row id (added rows move no other); "
        "files are named OUT.shard-I-of-N. `dspark merge` joins them.",
        "--shard",
        parser=Shard.parse,
        metavar="I/N",
    ),
]
DataParallelSize = Annotated[
    int | None,
    option(
        MEMORY,
        "Engines that share out the rows, each with its own devices (-tp of them) or its part of "
        "the cores. Default: 1; with --cluster as many as it has room for.",
        "--data-parallel-size",
        "-dp",
        parser=whole(1, 1024),
        metavar="N",
    ),
]
Resume = Annotated[
    bool,
    option(RUN, "Go on where OUT.journal ends; rows that did not change are not made again."),
]
ForceResume = Annotated[
    bool,
    option(RUN, "Resume although the model or settings changed.", "--force-resume"),
]
RerunRows = Annotated[
    list[Rerun] | None,
    option(
        RUN,
        "Make failed, or truncated rows again; repeatable.",
        "--rerun",
        metavar="failed|truncated",
    ),
]
Overwrite = Annotated[
    bool,
    option(RUN, "Start over: OUT, its errors file and journal are replaced.", "--overwrite"),
]
MetricsJson = Annotated[
    Path | None,
    option(REPORT, "Write speeds, acceptance and what ran.", metavar="FILE", dir_okay=False),
]
TraceFile = Annotated[
    Path | None,
    option(
        REPORT,
        "Write every round, with its budget, tier and times, as events for Chrome's tracing page "
        "or Perfetto.",
        "--trace",
        metavar="FILE",
        dir_okay=False,
    ),
]
Show = Annotated[
    int,
    option(REPORT, "Print the first N completions to stderr.", parser=whole(0), metavar="N"),
]


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Files that a run writes besides its output; a shard's carry its name."""

    metrics: Path | None
    progress: Path | None
    trace: Path | None

    @property
    def all(self) -> list[Path]:
        """Those that are asked for."""
        return [p for p in (self.metrics, self.progress, self.trace) if p is not None]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(EngineOptions, PromptOptions, SamplingOptions):
    """The command's parameters: a field is an option, its type says how it is spelled."""

    input: Input
    output: Output = None
    passthrough: Passthrough = False
    limit: options.Limit = None
    dry_run: DryRun = False
    chat: Chat = False
    model: Model
    compare_plain: ComparePlain = False
    max_tokens: MaxTokens = 1024
    n: N = 1
    shard: ShardOf = None
    data_parallel_size: DataParallelSize = None
    cluster: ClusterAddress = None
    resume: Resume = True
    force_resume: ForceResume = False
    rerun: RerunRows = None
    overwrite: Overwrite = False
    grace: options.Grace = 10.0
    metrics_json: MetricsJson = None
    progress_file: options.ProgressFile = None
    trace: TraceFile = None
    show: Show = 0
    quiet: options.Quiet = False
    debug: options.Debug = False

    def rules(self) -> RowRules:
        """What holds for every row that does not say otherwise.

        Raises:
            ConfigError: A sampling option is out of range, or --chat-template-kwargs is not JSON.
        """
        return RowRules(
            params=self.params(),
            n=self.n,
            chat=self.chat,
            template_kwargs=self.template_kwargs(),
            passthrough=self.passthrough,
        )

    def report_paths(self) -> "ReportPaths":
        """Where reports go."""
        asked = (self.metrics_json, self.progress_file, self.trace)
        named = [p if p is None or self.shard is None else self.shard.path(p) for p in asked]
        return ReportPaths(*named)

    def check(self) -> list[str]:
        """Refuse what contradicts itself before anything is loaded.

        Returns:
            What is allowed but may not be what was meant.

        Raises:
            ConfigError: A combination makes no sense.
        """
        contradictions = (
            *self._empty_names(),
            (self.output is None and not self.dry_run, "no --output", "add -o OUT.jsonl, or -o -"),
            (self.overwrite and self.rerun, "--overwrite leaves nothing to --rerun", "drop one"),
            (not self.resume and self.rerun, "--no-resume leaves nothing to --rerun", "drop one"),
            (
                not self.resume and self.force_resume,
                "--no-resume and --force-resume contradict each other",
                "drop one",
            ),
            (
                self.compare_plain and self.draft_name() is None,
                "--compare-plain needs a drafter to compare with",
                "give --draft",
            ),
            (
                self.output == "-" and (self.rerun or self.overwrite or self.force_resume),
                "-o - keeps no journal: --rerun, --overwrite and --force-resume need a file",
                "write to a file",
            ),
            *self._several_engines(),
            (
                self.output == "-" and self.show > 0,
                "--show repeats what -o - prints",
                "drop --show",
            ),
        )
        for wrong, message, hint in contradictions:
            if wrong:
                raise ConfigError(message, hint)
        return self._notes()

    def _several_engines(self) -> list[tuple[bool, str, str]]:
        """What one engine alone can do."""
        if self.cluster is None and self.data_parallel_size in (None, 1):
            return []
        ways = "--data-parallel-size" if self.cluster is None else "--cluster"
        return [
            (
                self.trace is not None,
                f"--trace shows the rounds of one engine, {ways} is for several",
                f"drop --trace or {ways}",
            ),
            (
                self.compare_plain,
                f"--compare-plain measures one engine, {ways} is for several",
                f"drop --compare-plain or {ways}",
            ),
            (
                "TORCHELASTIC_RUN_ID" in os.environ,
                "--data-parallel-size and --cluster start their own processes: not under torchrun",
                "run the command by itself",
            ),
        ]

    def _empty_names(self) -> list[tuple[bool, str, str]]:
        """Names that came out empty, as those of unset shell variables do."""
        names: tuple[tuple[str, str | None], ...] = (
            ("INPUT", self.input),
            ("--output", self.output),
            ("--model", self.model),
            ("--draft", self.draft),
            ("--cluster", self.cluster),
        )
        return [
            (
                value is not None and not value.strip(),
                f"{name} is empty: {value!r}",
                "give a name; is a shell variable unset?",
            )
            for name, value in names
        ]

    def _notes(self) -> list[str]:
        notes = []
        shaped = self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0
        if self.temperature == 0.0 and shaped:
            notes.append(
                "--top-p, --top-k and --min-p change nothing at --temperature 0 (only rows with "
                "their own temperature)"
            )
        if self.temperature == 0.0 and self.n > 1:
            notes.append(f"--n {self.n} at --temperature 0 makes {self.n} equal completions a row")
        if self.draft_name() is None:
            notes.append("no drafter: plain decoding, one token a step")
        return notes
