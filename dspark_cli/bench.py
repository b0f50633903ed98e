"""`dspark bench`: measure speed."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from dspark_cli import backend
from dspark_cli.bench_data import Prompts, make_prompts
from dspark_cli.bench_settings import ThroughputOptions
from dspark_cli.loading import load
from dspark_cli.output import check_folder, write_json
from dspark_cli.parameters import as_parameters
from dspark_cli.progress import shortage
from dspark_cli.sampling import effective
from dspark_cli.startup import Startup, process_started
from engine.config import EngineConfig
from engine.errors import ConfigError, DSparkError
from engine.locate import checkpoint_digest
from engine.request import FinishReason

if TYPE_CHECKING:
    from engine.engine import Engine
    from evals.throughput import Plan
    from evals.throughput_report import Result

COMMANDS = {
    "collapse": (
        "dspark_cli.bench_collapse:bench_collapse",
        "The end of a drafter whose tokens are dealt to processes.",
    ),
    "collectives": (
        "dspark_cli.bench_collectives:bench_collectives",
        "What several processes exchange.",
    ),
    "kernels": (
        "dspark_cli.bench_kernels:bench_kernels",
        "Each op against what the device can do.",
    ),
    "round": ("dspark_cli.bench_round:bench_round", "Rounds against their matrix products."),
    "throughput": ("dspark_cli.bench:throughput", "Tokens/s over batch sizes, drafted and plain."),
}


def throughput(**values: Any) -> None:
    """Measure output tokens/s at several batch sizes, drafted and plain, in one load.

    Passes alternate (drafted, plain, plain, drafted) after a warm-up. Outputs end where the model
    ends them, with the sampling given, unless --ignore-eos says otherwise. The table goes to
    stderr; --output-json and --out hold every number. `--compare A B` measures nothing and prints
    what changed between two runs.
    """
    given = ThroughputOptions(**values)
    if given.compare is not None:
        _compare(*given.compare, allow_different=given.allow_different)
        return
    given.check()
    ThroughputRun(given).run()


as_parameters(throughput, ThroughputOptions)


def _compare(base: Path, new: Path, *, allow_different: bool) -> None:
    from evals.compare import compare, read_run

    typer.echo(compare(read_run(base), read_run(new), allow_different=allow_different), nl=False)


class ThroughputRun:
    """One `dspark bench throughput`, once its options are known to agree.

    Args:
        given: The options.

    Raises:
        ConfigError: An option is out of range, or the reports cannot be written.
    """

    def __init__(self, given: ThroughputOptions) -> None:
        self.given = given
        self.startup: Startup | None = None
        self.config = given.engine_config()
        self.rules = given.rules()
        self.template = given.template_text()
        _ = given.data_name
        if given.out is not None:
            from evals.report import check_out

            check_out(given.out, overwrite=given.overwrite)
        if given.output_json not in (None, "-"):
            check_folder(Path(given.output_json or ""))

    def say(self, text: str) -> None:
        """To people."""
        if not self.given.quiet:
            sys.stderr.write(f"dspark: {text}\n")
            sys.stderr.flush()

    def run(self) -> None:
        """Measure and report."""
        from evals.timeline import Timeline

        timeline = Timeline(time.perf_counter, time.perf_counter())
        engine = self._load()
        self.startup = Startup(engine.stats, process_started())
        timeline.lap("load")
        prompts = make_prompts(
            self.given,
            self.rules,
            self.template,
            engine.tokenizer,
        )
        self._validate(engine, prompts)
        settings = self._settings(engine, prompts)
        self.say(_announce(settings, prompts))
        timeline.lap("prompts")
        result = self._measure(engine, prompts, timeline, settings)
        self._report(result, engine.config)

    def _load(self) -> "Engine":
        return load(self.config, quiet=self.given.quiet, say=self.say)

    def _measure(
        self, engine: "Engine", prompts: Prompts, timeline: Any, settings: dict[str, Any]
    ) -> "Result":
        from evals.throughput import crossover, measure
        from evals.throughput_report import Result

        plan = self._plan()
        points = measure(engine, prompts.requests, plan, timeline, self._told)
        self._tell_first_token()
        result = Result(
            points=tuple(points),
            crossover=crossover(points),
            settings=settings,
            windows=timeline.totals(),
        )
        warnings = [*prompts.notes, *self._warnings(result)]
        if (text := shortage(engine.stats)) is not None:
            warnings.append(f"{text}, but speeds do: larger batches were not what they say")
        return replace(result, warnings=tuple(warnings))

    def _told(self, text: str) -> None:
        """What measuring says; before it, once, how long the first token took."""
        self._tell_first_token()
        self.say(text)

    def _tell_first_token(self) -> None:
        if self.startup is not None and (line := self.startup.line()) is not None:
            self.say(line)
            self.startup = None

    def _plan(self) -> "Plan":
        from evals.throughput import Plan

        return Plan(
            max_num_seqs=self.given.widths,
            pairs=self.given.pairs,
            drafted=self.config.draft is not None,
            num_prompts=self.given.num_prompts,
        )

    def _validate(self, engine: "Engine", prompts: Prompts) -> None:
        """Refuse prompts that would fail in the middle of a measurement."""
        for request in prompts.requests:
            try:
                engine.validate(request)
            except DSparkError as error:
                where = f"prompt {request.request_id} of {prompts.name}"
                raise ConfigError(f"{where}: {error}", error.hint) from None

    def _settings(self, engine: "Engine", prompts: Prompts) -> dict[str, Any]:
        """What decides the numbers; `--compare` wants it equal."""
        from evals.manifest import describe_device

        config, draft = engine.config, self.config.draft
        device = describe_device(config.device)
        return {
            "model": config.model,
            "model_digest": self._digest(config.model, "target"),
            "draft": draft,
            "draft_digest": None if draft is None else self._digest(draft, "draft"),
            "num_speculative_tokens": len(engine.stats.drafted_at) if draft else None,
            "verify": (config.verify or "lagged") if draft else None,
            "device": config.device,
            "device_name": device.get("name") or device.get("machine"),
            "threads": device.get("threads"),
            "dtype": config.dtype,
            "max_model_len": engine.max_model_len,
            "max_num_batched_tokens": engine.limits.max_num_batched_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
            "data": prompts.name,
            "data_sha256": prompts.sha256,
            "prompts": self.given.num_prompts or "4 times the batch size, at least 8",
            "pairs": self.given.pairs,
            "synthetic_acceptance": self.given.synthetic_acceptance,
            **effective(self.rules.params),
        }

    def _digest(self, name: str, role: Literal["target", "draft"]) -> str:
        """What names a checkpoint whatever its path; random weights are named by their shape."""
        if self.given.is_shape:
            return name
        return checkpoint_digest(backend.locate_checkpoint(name, role))

    def _warnings(self, result: "Result") -> list[str]:
        found = []
        made_up = self.config.synthetic_acceptance
        if made_up is not None:
            found.append(
                f"--synthetic-acceptance {made_up:g}: acceptance is made up, and with it every "
                "number of drafted passes and the speed-up; their texts are not the model's"
            )
        if self.given.is_shape:
            found.append("random weights: of real ones, only the shape")
        if self.rules.params.ignore_eos:
            found.append(
                "--ignore-eos: text after the end is forced; it is easier to draft, so acceptance "
                "and speed-up are higher than in real use"
            )
        if self.given.is_random:
            found.append("random prompts: acceptance and speed-up say nothing about real text")
        if self.config.enable_prefix_caching:
            found.append("prefix caching is on: passes may find prompts of the pass before")
        for point in result.points:
            if point.requests < 2 * point.max_num_seqs:
                found.append(
                    f"{point.requests} requests for a batch of {point.max_num_seqs}: mostly ramp "
                    "and tail; give more --data"
                )
            unequal = [point.requests - pair.equal_outputs for pair in point.pairs]
            if self.rules.params.temperature == 0 and made_up is None and any(unequal):
                found.append(
                    f"{max(unequal)} of {point.requests} greedy outputs differ from plain ones at "
                    f"{point.max_num_seqs} at once (near ties of a low dtype, or a bug)"
                )
        found += _cut_share(result)
        return found

    def _report(self, result: "Result", config: EngineConfig) -> None:
        from evals.manifest import manifest
        from evals.report import SCHEMA_VERSION, write_report
        from evals.throughput_report import report, summary, tables

        body = summary(result)
        if not self.given.quiet:
            sys.stderr.write(f"\n{tables(body)}\n")
        self.say(result.crossover.verdict)
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.windows.items())
        self.say(f"seconds: {spent}; all {sum(result.windows.values()):.1f}")
        for warning in result.warnings:
            self.say(f"note: {warning}")
        made = manifest(
            settings=result.settings,
            inputs={"data": result.settings["data"], "sha256": result.settings["data_sha256"]},
            device=config.device,
        )
        if self.given.output_json is not None:
            head = {"schema": "dspark/bench-throughput", "schema_version": SCHEMA_VERSION}
            _write_json(self.given.output_json, {**head, **body, "manifest": made})
        if self.given.out is not None:
            write_report(report(result, made), self.given.out)
            self.say(f"wrote {self.given.out / 'report.html'} and what it is made from")


def _announce(settings: dict[str, Any], prompts: Prompts) -> str:
    made_up = settings["synthetic_acceptance"]
    ending = (
        f"every output forced to {settings['max_tokens']} tokens (--ignore-eos)"
        if settings["ignore_eos"]
        else f"natural end of output, at most {settings['max_tokens']} tokens"
    )
    lengths = [len(request.prompt_token_ids) for request in prompts.requests]
    return (
        f"{settings['model']} with {settings['draft'] or 'no drafter'} on {settings['device']} in "
        f"{settings['dtype']}; {len(lengths)} prompts of {prompts.name}, {min(lengths)} to "
        f"{max(lengths)} tokens; temperature {settings['temperature']:g}, {ending}"
        + ("" if made_up is None else f"; acceptance length made up, {made_up:g}")
    )


def _cut_share(result: "Result") -> list[str]:
    done = [d for p in result.points for made in (*p.drafted, *p.plain) for d in made.done]
    cut = sum(d.finish_reason is FinishReason.LENGTH for d in done)
    if not cut or result.settings["ignore_eos"]:
        return []
    return [f"{100 * cut / len(done):.0f} % of outputs were cut at --max-tokens"]


def _write_json(name: str, value: dict[str, Any]) -> None:
    if name == "-":
        sys.stdout.buffer.write(json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")
        sys.stdout.buffer.flush()
        return
    write_json(Path(name), value)
