"""`dspark calibrate`: what a drafter's confidences mean, as a file for --calibration."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_cli import backend, options
from dspark_cli.bench_data import read_prompts
from dspark_cli.engine_options import EngineOptions, Model
from dspark_cli.fingerprint import dspark_version
from dspark_cli.options import REPORT, option
from dspark_cli.output import check_folder, write_json, write_text
from dspark_cli.parameters import as_parameters
from dspark_cli.progress import LoadProgress
from dspark_cli.prompt_options import Chat, PromptOptions
from dspark_cli.reliability import plot
from dspark_cli.rows import RowRules
from dspark_cli.sampling import effective
from dspark_cli.sampling_options import MaxTokens, SamplingOptions
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from engine.calibrating import Calibrated

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Prompts like those to come: rows as `dspark generate` reads them, also GSM8K and "
        "SPEED-Bench files (first turns); or demo. A third of the rows is held out.",
    ),
]
Output = Annotated[
    Path,
    option(REPORT, "Calibration to write, JSON.", "--output", "-o", metavar="FILE", dir_okay=False),
]
Plot = Annotated[
    Path | None,
    option(
        REPORT,
        "Reliability plot to write, SVG. Default: beside --output.",
        metavar="FILE",
        dir_okay=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(EngineOptions, PromptOptions, SamplingOptions):
    """The command's parameters."""

    input: Input
    model: Model
    output: Output
    plot: Plot = None
    limit: options.Limit = None
    chat: Chat = False
    max_tokens: MaxTokens = 256
    verify: None = field(default=None, init=False)  # every draft is verified
    cost_table: None = field(default=None, init=False)
    calibration: None = field(default=None, init=False)
    quiet: options.Quiet = False
    debug: options.Debug = False

    @property
    def plot_path(self) -> Path:
        """Where the plot goes."""
        return self.plot or self.output.with_suffix(".svg")

    def rules(self) -> RowRules:
        """What holds for every row that does not say otherwise.

        Raises:
            ConfigError: A sampling option is out of range, or --chat-template-kwargs is not JSON.
        """
        return RowRules(
            params=self.params(), chat=self.chat, template_kwargs=self.template_kwargs()
        )

    def engine_config(self, **derived: Any) -> EngineConfig:
        """The engine's settings.

        Raises:
            ConfigError: There is no drafter.
        """
        if self.draft_name() is None:
            raise ConfigError("without a drafter there is nothing to calibrate", "give --draft")
        return super().engine_config(verify="all", **derived)


def calibrate(**values: Any) -> None:
    """Fit a temperature and a shift a draft position, so that confidences mean what they say.

    Decodes the prompts with every draft verified. The file names the pair it was made for; another
    one refuses it. It decides how much is verified, and nothing about the outputs' distribution.
    """
    given = CalibrateOptions(**values)
    config, rules = given.engine_config(), given.rules()
    check_folder(given.output)
    check_folder(given.plot_path)
    template = given.template_text()
    progress = LoadProgress(given.quiet)
    try:
        engine = backend.load_engine(config, progress)
        from engine.calibrating import calibrate as fit

        requests, _ = read_prompts(given.limit, given.input, rules, template, engine.tokenizer)
        for request in requests:
            try:
                engine.validate(request)
            except RequestError as error:
                where = f"row {request.request_id} of {given.input}"
                raise ConfigError(f"{where}: {error}", error.hint) from None
        about = {
            "dspark": dspark_version(),
            "model": config.model,
            "draft": config.draft,
            "device": engine.config.device,
            "dtype": engine.config.dtype,
            "prompts": given.input,
            "rows": len(requests),
            **effective(rules.params),
        }
        made = fit(engine, requests, about, lambda n: progress("calibrate", n, len(requests)))
    finally:
        progress.close()
    write_json(given.output, made.calibration.to_json())
    write_text(given.plot_path, _plot(made))
    if not given.quiet:
        sys.stderr.write(_summary(made))
        sys.stderr.write(f"dspark: wrote {given.output} and {given.plot_path}\n")


as_parameters(calibrate, CalibrateOptions)


def _plot(made: "Calibrated") -> str:
    found = made.calibration
    return plot(
        f"Survival on {found.rounds_held_out} held-out rounds",
        {
            f"raw, ECE {100 * found.overall_before:.1f} %": made.before,
            f"calibrated, ECE {100 * found.overall_after:.1f} %": made.after,
        },
    )


def _summary(made: "Calibrated") -> str:
    found = made.calibration
    head = "| position | temperature | shift | ECE before | ECE after |\n" + "|---" * 5 + "|\n"
    rows = zip(found.temperatures, found.shifts, found.ece_before, found.ece_after, strict=True)
    lines = [
        f"| {k} | {t:.3f} | {s:+.3f} | {100 * b:.2f} % | {100 * a:.2f} % |\n"
        for k, (t, s, b, a) in enumerate(rows)
    ]
    return (
        head + "".join(lines) + f"all positions: ECE {100 * found.overall_before:.2f} % before, "
        f"{100 * found.overall_after:.2f} % after, on {found.rounds_held_out} held-out rounds "
        f"({found.rounds_fitted} fitted)\n"
    )
