"""Options that evaluations with a journal share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dspark_cli import options
from dspark_cli.engine_options import EngineOptions, OptionalModel
from dspark_cli.options import EVALUATION, REPORT, RUN, option
from dspark_cli.prompt_options import PromptOptions

Out = Annotated[
    Path,
    option(
        REPORT,
        "Folder for summary.json, per_request.jsonl, matrix.csv, manifest.json, report.html and "
        "the journal that a stopped run goes on from.",
        "--out",
        "-o",
        metavar="DIR",
        file_okay=False,
    ),
]
Overwrite = Annotated[
    bool, option(RUN, "Start over: what DIR holds of a run is replaced.", "--overwrite")
]
ComparePlain = Annotated[
    bool,
    option(
        EVALUATION,
        "Decode the same rows without the drafter, too: a paired table, flipped ids, exact McNemar "
        "p, both speeds.",
        "--compare-plain",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EvalOptions(EngineOptions, PromptOptions):
    """What decides the engine, the prompts and how the evaluation runs."""

    model: OptionalModel = None
    limit: options.Limit = None
    overwrite: Overwrite = False
    grace: options.Grace = 10.0
    progress_file: options.ProgressFile = None
    quiet: options.Quiet = False
    debug: options.Debug = False
