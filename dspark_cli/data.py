"""`dspark data`: check and prepare data sets; nothing is downloaded."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_cli.jsonl import dumps
from dspark_cli.output import write_atomically
from engine.errors import ConfigError, DSparkError

if TYPE_CHECKING:
    from evals.speed_bench.layouts import SpeedBench
    from evals.speed_bench.prepare import Prepared

MISSING_ROWS = 3

COMMANDS = {
    "speed-bench": ("dspark_cli.data:SPEED_BENCH", "SPEED-Bench: what is there, what is missing."),
}
SPEED_BENCH = {
    "check": ("dspark_cli.data:check", "Tell layout, counts and placeholders of a file."),
    "prepare": ("dspark_cli.data:prepare", "Fill placeholders from files you have."),
}

Source = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A JSONL or parquet file, or a folder of them, in any layout."
    ),
]
Subset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which config of a folder: qualitative, throughput_1k, ..."),
]


def check(path: Source, subset: Subset = None) -> None:
    """Tell the layout of SPEED-Bench files, count rows and turns, and find placeholders.

    Exits with 3 if rows are placeholders.
    """
    from evals.speed_bench.layouts import load

    data = load(path, subset)
    typer.echo("\n".join(_describe(data)))
    if data.placeholders:
        typer.echo("\n" + "\n".join(_needs(data, path)))
        raise typer.Exit(MISSING_ROWS)


def prepare(
    path: Source,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="JSONL to write.")],
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A file of one of the sources, as JSONL or parquet; repeatable. `check` lists "
            "the names.",
        ),
    ] = None,
    built: Annotated[
        list[Path] | None,
        typer.Option(
            "--with",
            metavar="FILE",
            help="Rows built elsewhere, by question_id, in any layout; repeatable.",
        ),
    ] = None,
    subset: Subset = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Fill placeholders of SPEED-Bench from local files; fetches nothing.

    Rows that stay without text are left out and listed, and the rows written carry the name of the
    subset they are. Exits with 3 if any are left out.
    """
    from evals.speed_bench.layouts import load
    from evals.speed_bench.prepare import Given, as_record
    from evals.speed_bench.prepare import prepare as fill

    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists", "choose another -o, or add --overwrite")
    data = load(path, subset)
    made = fill(data, [Given.parse(text) for text in source or ()], built or ())
    if made.rows:
        _write(output, b"".join(dumps(as_record(row, made.subset)) for row in made.rows))
    for line in _outcome(made, data, output):
        sys.stderr.write(f"dspark: {line}\n")
    if made.missing:
        left = [row for rows in made.missing.values() for row in rows]
        sys.stderr.write("\n".join(_needs(replace(data, conversations=tuple(left)), path)) + "\n")
        raise typer.Exit(MISSING_ROWS)


def _write(path: Path, text: bytes) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error.strerror}", "choose another -o") from None


def _describe(data: "SpeedBench") -> list[str]:
    from evals.speed_bench.layouts import LAYOUTS

    rows = data.conversations
    several = sum(len(row.turns) > 1 for row in rows)
    missing = Counter(row.category for row in data.placeholders)
    lines = [
        f"layout        {data.layout}: {LAYOUTS[data.layout]}",
        f"subset        {data.subset}",
        f"rows          {len(rows)}, {several} of several turns, "
        f"{sum(len(row.turns) for row in rows)} turns in all",
        f"placeholders  {len(data.placeholders)}",
        f"sha256        {data.sha256}",
        "",
        f"{'category':<20} {'rows':>6} {'turns':>6} {'placeholders':>13}",
    ]
    for name in sorted({row.category for row in rows}):
        own = [row for row in rows if row.category == name]
        turns = sum(len(row.turns) for row in own)
        lines.append(f"{name:<20} {len(own):>6} {turns:>6} {missing[name]:>13}")
    return lines


def _needs(data: "SpeedBench", path: Path) -> list[str]:
    """Per source of the placeholders: how many, what would fill them, under which terms."""
    from evals.speed_bench.placeholders import OFFICIAL, source_name, source_of

    counts = Counter(source_name(row.source) for row in data.placeholders)
    fields = {source_name(row.source): row.source for row in data.placeholders}
    lines = ["texts that are missing, by source:"]
    for name, count in counts.most_common():
        known = source_of(fields[name])
        lines.append(f"  {name}: {count} rows")
        if known is None:
            continue
        if known.file and (name != "hle" or data.config == "qualitative"):
            lines.append(f"    fill: --source {name}=FILE, {known.file}")
        else:
            lines.append(
                "    fill: its prompts are worded by the official script alone; --with OUT"
            )
        gated = "gated: accept its terms on the Hub and log in; " if known.gated else ""
        lines.append(f"    terms: {gated}its own, not dspark's to pass on: {known.card}")
    return [
        *lines,
        f"fill them:    dspark data speed-bench prepare {path} -o {data.config}.jsonl --source ...",
        f"or build all: {OFFICIAL}",
        "or run the rest under its own name: dspark eval speed-bench --clean-subset",
        "SPEED-Bench itself is under the NVIDIA Evaluation Dataset License; it is not in dspark.",
    ]


def _outcome(made: "Prepared", data: "SpeedBench", output: Path) -> list[str]:
    lines = [f"{count} rows filled from {name}" for name, count in made.filled.items()]
    for why, rows in made.missing.items():
        ids = ", ".join(row.id for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
        lines.append(f"{len(rows)} rows left out ({ids}): {why}")
    if made.rows:
        total = len(data.conversations)
        lines.append(f"wrote {output}: {len(made.rows)} of {total} rows, subset {made.subset}")
    else:
        lines.append(f"no row has its text; {output} was not written")
    return lines
