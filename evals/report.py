"""The files of an evaluation or a benchmark: the same five whatever was measured.

    summary.json        {"schema": "dspark/<kind>", "schema_version": 1, ...what the caller gives}
    per_request.jsonl   a line a request, with `index` and `id`; no field changes its meaning
    matrix.csv          a line a point (a category, a concurrency, ...); columns are the union of
                        the rows' keys in order of appearance, empty where a row has none
    manifest.json       how to run it again: see evals.manifest
    report.html         evals.page with charts of evals.charts, self-contained

Use: build a `Report`, call `write_report(report, folder)`. Files are replaced one by one, each in
one step; nothing else in the folder is touched.
"""

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, DSparkError
from evals.charts import bars, histogram, lines
from evals.metrics import Acceptance
from evals.page import Block, Charts, Code, Fact, Page, Section, Table, Text, render

__all__ = [
    "Block",
    "Charts",
    "Code",
    "Fact",
    "Page",
    "Report",
    "Section",
    "Table",
    "Text",
    "acceptance_section",
    "bars",
    "check_out",
    "histogram",
    "lines",
    "write_report",
]

SCHEMA_VERSION = 1
"""Raised when a field of `summary.json` changes its meaning or goes; new fields do not raise it."""

NAMES = ("summary.json", "per_request.jsonl", "matrix.csv", "manifest.json", "report.html")

# Line breaks to some readers, though not to JSON.
_BREAKS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is written."""

    kind: str
    """What was measured, as `eval-gsm8k` or `bench-throughput`; names the schema."""

    summary: Mapping[str, Any]
    """JSON; the schema fields are put before it."""

    per_request: Sequence[Mapping[str, Any]] = ()
    matrix: Sequence[Mapping[str, Any]] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)
    page: Page


def check_out(folder: Path, *, overwrite: bool) -> None:
    """Make sure, before anything runs, that the reports can be written.

    Raises:
        ConfigError: The place will not do, or holds reports of an earlier run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make {folder}: {error.strerror}", "choose another --out"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder} cannot be written to", "choose another --out")
    found = next((name for name in NAMES if (folder / name).exists()), None)
    if found is not None and not overwrite:
        raise ConfigError(
            f"{folder / found} exists", "choose another --out, or add --overwrite to replace it"
        )


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write the five files.

    Args:
        report: What they hold.
        folder: Where; made if need be.

    Returns:
        Their paths.

    Raises:
        DSparkError: The disk refuses.
    """
    head = {"schema": f"dspark/{report.kind}", "schema_version": SCHEMA_VERSION}
    texts = {
        "summary.json": _json({**head, **report.summary}),
        "per_request.jsonl": "".join(map(_line, report.per_request)),
        "matrix.csv": _csv(report.matrix),
        "manifest.json": _json({**head, **report.manifest}),
        "report.html": render(report.page),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(folder / name, text) for name, text in texts.items()]
    except OSError as error:
        raise DSparkError(
            f"cannot write {error.filename or folder}: {error.strerror}", "make room, run it again"
        ) from None


def acceptance_section(found: Acceptance) -> Section | None:
    """The part of the page about drafting; None without a round."""
    if not found.rounds:
        return None
    labels = [str(p.position) for p in found.positions]
    committed = [100 * count / found.rounds for count in found.histogram]
    charts = Charts(
        [
            bars(
                "Acceptance by draft position",
                labels,
                {
                    "kept, of all rounds": [p.survival for p in found.positions],
                    "kept, given all before": [p.conditional for p in found.positions],
                },
                x_label="draft position, from 0",
                y_label="share of rounds",
                y_most=1.0,
                values=False,
            ),
            bars(
                "Committed tokens a round",
                [str(count) for count in range(1, len(committed))],
                {"rounds": committed[1:]},
                x_label="tokens committed, bonus token included",
                y_label="% of rounds",
            ),
        ]
    )
    rows = [
        [
            str(p.position),
            _share(p.survival),
            _share(p.among_proposed),
            _share(p.conditional),
            str(p.accepted),
            str(p.rounds),
            str(p.proposed),
            str(p.reached),
        ]
        for p in found.positions
    ]
    shares = ("kept of all rounds", "of those proposed", "given all before")
    columns = ("position", *shares, "kept", "rounds", "proposed", "all before kept")
    low, high = found.length_interval or (0.0, 0.0)
    interval = f" (95 % interval over requests {low:.2f} to {high:.2f})" if high else ""
    text = Text(
        f"Acceptance length {found.length or 0:.3f} pooled{interval}, "
        f"{found.length_per_request or 0:.3f} as the mean over {found.requests} requests: "
        "committed tokens per round, bonus token included, counted after the cut at the end of "
        "a sequence. "
        f"{found.rounds} rounds, {found.accepted} of {found.drafted} drafts kept."
    )
    return Section("Acceptance", [text, charts, Table(columns, rows)])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    for mark, escaped in _BREAKS.items():
        text = text.replace(mark, escaped)
    return text + "\n"


def _csv(rows: Iterable[Mapping[str, Any]]) -> str:
    kept = list(rows)
    columns = list(dict.fromkeys(name for row in kept for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    return stream.getvalue()


def _write(path: Path, text: str) -> Path:
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_bytes(text.encode("utf-8", "replace"))
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    return path
