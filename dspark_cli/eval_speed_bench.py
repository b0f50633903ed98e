"""`dspark eval speed-bench`: all turns of SPEED-Bench, acceptance by category and entropy tier."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_cli import backend, options
from dspark_cli.engine_options import EngineOptions, Model
from dspark_cli.fingerprint import text_digest
from dspark_cli.loading import load
from dspark_cli.options import EVALUATION, option
from dspark_cli.parameters import as_parameters
from dspark_cli.prompt_options import PromptOptions
from dspark_cli.sampling import effective
from dspark_cli.sampling_options import MaxTokens, SamplingOptions
from engine.errors import ConfigError
from engine.locate import checkpoint_digest

if TYPE_CHECKING:
    from engine.engine import Engine
    from evals.speed_bench.layouts import SpeedBench
    from evals.speed_bench.play import Turn
    from evals.speed_bench.summary import Result
    from evals.timeline import Timeline

FAILED_ROWS = 3
LOG_SECONDS = 10.0


Data = Annotated[
    Path,
    option(
        EVALUATION,
        "SPEED-Bench as a JSONL or parquet file, or a folder of them, in any of the layouts in "
        "use; see `dspark data speed-bench check`.",
        metavar="PATH",
    ),
]
Subset = Annotated[
    str | None,
    option(EVALUATION, "Which config of a folder: qualitative, throughput_1k, ...", metavar="NAME"),
]
Category = Annotated[
    list[str] | None, option(EVALUATION, "Only this category; repeatable.", metavar="NAME")
]
CleanSubset = Annotated[
    bool,
    option(
        EVALUATION,
        "Leave placeholder rows out; the subset's name then says so in every number.",
        "--clean-subset",
    ),
]
FirstTurnOnly = Annotated[
    bool,
    option(
        EVALUATION,
        "Play first turns only, as the benchmarks of vLLM and SGLang do.",
        "--first-turn-only",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SpeedBenchOptions(EngineOptions, PromptOptions, SamplingOptions):
    """The command's parameters: a field is an option, its type says how it is spelled."""

    data: Data
    model: Model
    subset: Subset = None
    category: Category = None
    clean_subset: CleanSubset = False
    first_turn_only: FirstTurnOnly = False
    limit: options.Limit = None
    max_tokens: MaxTokens = 4096
    out: options.ReportFolder = None
    overwrite: options.ReplaceReports = False
    quiet: options.Quiet = False
    debug: options.Debug = False


def speed_bench(**values: Any) -> None:
    """Play SPEED-Bench and report acceptance by category and by entropy tier.

    All turns are played, the model's own replies fed back; outputs end where the model ends them.
    Rows whose text is missing are refused, with what would fill them. The data set is not part of
    dspark. Exits with 3 if turns failed.
    """
    raise typer.Exit(SpeedBenchRun(SpeedBenchOptions(**values)).run())


as_parameters(speed_bench, SpeedBenchOptions)


class SpeedBenchRun:
    """One `dspark eval speed-bench`.

    Args:
        given: The options.

    Raises:
        ConfigError: An option is out of range, the data will not do, or reports cannot be written.
    """

    def __init__(self, given: SpeedBenchOptions) -> None:
        self.given = given
        self.config = given.engine_config()
        self.params = given.params()
        self.template = given.template_text()
        self.template_kwargs = given.template_kwargs()
        if given.overwrite and given.out is None:
            raise ConfigError("--overwrite is for --out", "drop it")
        if given.out is not None:
            from evals.report import check_out

            check_out(given.out, overwrite=given.overwrite)
        self.data = read_data(given)
        self._next_line = time.monotonic() + LOG_SECONDS
        self._played = 0

    @property
    def first_turn_only(self) -> bool:
        """Are only first turns played, by choice or because there are no others?"""
        return self.given.first_turn_only or self.data.first_turn_only

    def say(self, text: str) -> None:
        """To people."""
        if not self.given.quiet:
            sys.stderr.write(f"dspark: {text}\n")
            sys.stderr.flush()

    def run(self) -> int:
        """Play and report; the exit code."""
        from evals.timeline import Timeline

        data = self.data
        self.say(
            f"{data.subset}: {len(data.conversations)} conversations, layout {data.layout}, "
            f"{'first turns' if self.first_turn_only else 'all turns'}"
        )
        timeline = Timeline(time.perf_counter, time.perf_counter())
        engine = self._load()
        timeline.lap("load")
        result = self._play(engine, timeline)
        self._report(result, engine)
        return FAILED_ROWS if any(turn.completion is None for turn in result.turns) else 0

    def _load(self) -> "Engine":
        return load(self.config, quiet=self.given.quiet, say=self.say)

    def _play(self, engine: "Engine", timeline: "Timeline") -> "Result":
        from evals.metrics import check_completion, check_counters
        from evals.speed_bench.play import Player, PlaySettings, in_order
        from evals.speed_bench.summary import Result

        settings = PlaySettings(
            params=self.params,
            first_turn_only=self.first_turn_only,
            template_kwargs=self.template_kwargs,
            chat_template=self.template,
            speculate=self.config.draft is not None,
        )
        player = Player(engine, self.data.conversations, settings)
        total, before = player.num_turns, replace(engine.stats, seconds={})
        timeline.lap("prepare")
        found = []
        for turn in player.play():
            found.append(turn)
            self._progress(total)
        timeline.lap("run")
        turns = in_order(found, self.data.conversations)
        done = [turn.completion for turn in turns if turn.completion is not None]
        for completion in done:
            check_completion(completion)
        if len(done) == len(turns):
            check_counters(done, before, engine.stats)
        return Result(
            data=self.data,
            turns=tuple(turns),
            first_turn_only=self.first_turn_only,
            max_num_seqs=engine.limits.max_num_seqs,
            run=timeline.windows[-1],
            settings=self._settings(engine),
            windows=timeline.totals(),
            notes=tuple(self._notes(turns)),
        )

    def _progress(self, total: int) -> None:
        self._played += 1
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LOG_SECONDS
            self.say(f"{self._played} of {total} turns")

    def _settings(self, engine: "Engine") -> dict[str, Any]:
        config, draft = engine.config, self.config.draft
        folder = backend.locate_checkpoint(config.model, "target")
        return {
            "model": config.model,
            "model_digest": checkpoint_digest(folder),
            "draft": draft,
            "draft_digest": None
            if draft is None
            else checkpoint_digest(backend.locate_checkpoint(draft, "draft")),
            "num_speculative_tokens": len(engine.stats.drafted_at) if draft else None,
            "verify": (config.verify or "lagged") if draft else None,
            "device": config.device,
            "dtype": config.dtype,
            "max_num_seqs": engine.limits.max_num_seqs,
            "max_model_len": engine.max_model_len,
            "enable_prefix_caching": config.enable_prefix_caching,
            "subset": self.data.subset,
            "turns_played": "first" if self.first_turn_only else "all",
            "chat_template": text_digest(self.template),
            "chat_template_kwargs": dict(self.template_kwargs),
            **effective(self.params),
        }

    def _notes(self, turns: "list[Turn]") -> list[str]:
        notes = []
        if self.data.first_turn_only and not self.given.first_turn_only:
            notes.append(f"the layout {self.data.layout} holds first turns only")
        if self.params.ignore_eos:
            notes.append("--ignore-eos: text after the end is forced; it raises acceptance")
        expected = sum(1 if self.first_turn_only else len(c.turns) for c in self.data.conversations)
        if len(turns) < expected:
            notes.append(
                f"{expected - len(turns)} turns were not played: an earlier turn of their "
                "conversation failed"
            )
        return notes

    def _report(self, result: "Result", engine: "Engine") -> None:
        from evals.manifest import manifest
        from evals.report import write_report
        from evals.speed_bench.report import report
        from evals.speed_bench.summary import summary, table

        body = summary(result)
        if not self.given.quiet:
            for part in ("by_category", "by_tier", "by_turn"):
                if body[part]:
                    sys.stderr.write(f"\n{table(body, part)}")
            sys.stderr.write("\n")
        reuse = body["prefix_reuse"]
        if reuse["later_turns"]:
            self.say(
                f"{reuse['later_turns']} later turns: {reuse['cached_prompt_tokens']} of "
                f"{reuse['prompt_tokens']} prompt tokens were found in the KV cache"
            )
        self.say(f"{body['tokens_per_second']} tokens/s over the run ({result.name})")
        for note in result.notes:
            self.say(f"note: {note}")
        if self.given.out is not None:
            made = manifest(
                settings=result.settings,
                inputs={
                    "data": str(self.given.data),
                    "rows": len(result.data.conversations),
                    "sha256": result.data.sha256,
                },
                device=engine.config.device,
            )
            write_report(report(result, made), self.given.out)
            self.say(f"wrote {self.given.out / 'report.html'} and what it is made from")


def read_data(given: SpeedBenchOptions) -> "SpeedBench":
    """The rows to play.

    Raises:
        ConfigError: Rows are placeholders and nothing says to leave them out.
    """
    from evals.speed_bench.layouts import clean, load, narrow

    data = narrow(load(given.data, given.subset), tuple(given.category or ()), None)
    missing = data.placeholders
    if missing and not given.clean_subset:
        raise ConfigError(
            f"{len(missing)} of {len(data.conversations)} rows of {data.subset} are placeholders "
            f"(first: row {missing[0].row} of {missing[0].file}, from {missing[0].source})",
            f"fill them: dspark data speed-bench prepare {given.data} -o {data.config}.jsonl (it "
            "tells what it needs); or run the rest with --clean-subset",
        )
    return narrow(clean(data), (), given.limit)
