"""`dspark merge`: the shards of a run into one output, one errors file, one metrics file."""

import json
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_cli import options
from dspark_cli.joining import Part, check_parts, join
from dspark_cli.metrics import merge_metrics, write_metrics
from dspark_cli.options import IN_OUT, REPORT, RUN, option
from dspark_cli.output import OutputPaths, check_folder
from dspark_cli.parameters import as_parameters
from dspark_cli.run import FAILED_ROWS
from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The command's parameters: a field is an option, its type says how it is spelled."""

    shards: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SHARD]...",
            help="Outputs of all shards. Default: OUT.shard-I-of-N beside OUT.",
            show_default=False,
        ),
    ] = None
    output: Annotated[
        Path,
        option(
            IN_OUT,
            "JSONL to write, in input order: the -o of the shards' runs. Failed rows go to "
            "OUT.errors.jsonl.",
            "--output",
            "-o",
            metavar="OUT",
            dir_okay=False,
        ),
    ]
    overwrite: Annotated[bool, option(RUN, "Replace OUT and its errors file.", "--overwrite")] = (
        False
    )
    metrics_json: Annotated[
        Path | None,
        option(
            REPORT,
            "Write the shards' metrics as one: the --metrics-json of their runs.",
            metavar="FILE",
            dir_okay=False,
        ),
    ] = None
    quiet: options.Quiet = False
    debug: options.Debug = False


def merge(**values: Any) -> None:
    """Join what the runs of `dspark generate --shard` wrote into one output in input order.

    Refused with a list if shards or rows are missing or there twice, if a shard is not finished,
    or if they were made with other settings or from other rows. The shards' files stay.
    """
    given = MergeOptions(**values)
    if str(given.output) == "-":
        raise ConfigError("merge writes files, and -o - is none", "give -o OUT, and read OUT")
    paths = OutputPaths.of(str(given.output))
    assert paths.rows is not None
    assert paths.errors is not None
    check_folder(paths.rows)
    for path in (paths.rows, paths.errors):
        if path.exists() and not given.overwrite:
            raise ConfigError(f"{path} exists", "choose another -o, or add --overwrite")
    parts = [Part.read(path) for path in given.shards or _beside(given.output)]
    notes = check_parts(parts)
    metrics = None if given.metrics_json is None else _read_metrics(given.metrics_json, parts)
    lines, failures = join(parts, paths.rows, paths.errors)
    if metrics is not None and given.metrics_json is not None:
        write_metrics(given.metrics_json, metrics)
    if not given.quiet:
        for note in notes:
            typer.echo(f"dspark: {note}", err=True)
        failed = f", {failures} failed: see {paths.errors}" if failures else ""
        typer.echo(f"dspark: {lines} lines of {len(parts)} shards{failed}", err=True)
        typer.echo(f"dspark: wrote {paths.rows}", err=True)
    raise typer.Exit(FAILED_ROWS if failures else 0)


def _beside(output: Path) -> list[Path]:
    """The shards' outputs that are named after OUT, those that only begun shards will have too."""
    begin = f"{escape(output.stem)}.shard-*-of-*"
    found = set(output.parent.glob(f"{begin}{output.suffix}"))
    found |= {path.with_suffix(output.suffix) for path in output.parent.glob(f"{begin}.journal")}
    kinds = (".errors.jsonl", ".journal")
    shards = sorted(path for path in found if not path.name.endswith(kinds))
    if not shards:
        raise ConfigError(
            f"there are no shards of {output}", "name their outputs, or the -o of their runs"
        )
    return shards


def _read_metrics(path: Path, parts: list[Part]) -> dict[str, Any]:
    """The shards' metrics as one.

    Raises:
        ConfigError: One is not there, or is none.
    """
    found = []
    for part in parts:
        own = part.shard.path(path)
        try:
            found.append(json.loads(own.read_bytes()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"no metrics of shard {part.shard}: {own}: {error}",
                "run every shard with --metrics-json, or drop it",
            ) from None
    return merge_metrics(found)


as_parameters(merge, MergeOptions)
