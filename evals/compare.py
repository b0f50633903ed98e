"""Two throughput runs side by side, as one shows a change in a pull request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from evals.markdown import markdown
from evals.report import SCHEMA_VERSION

SCHEMA = "dspark/bench-throughput"

# Name in the table -> (mode, where in the mode's JSON, is more better?)
_MEASURES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "drafted tok/s": ("drafted", ("tokens_per_second",), True),
    "plain tok/s": ("plain", ("tokens_per_second",), True),
    "ITL p50 ms": ("drafted", ("itl_ms", "p50"), False),
    "ITL p99 ms": ("drafted", ("itl_ms", "p99"), False),
    "TTFT p50 ms": ("drafted", ("ttft_ms", "p50"), False),
    "acceptance": ("drafted", ("acceptance", "acceptance_length"), True),
}


def read_run(path: Path) -> dict[str, Any]:
    """The summary of a run: a file of `--output-json`, or a folder of `--out`.

    Raises:
        ConfigError: It is not one.
    """
    file = path / "summary.json" if path.is_dir() else path
    try:
        body = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", "give what --output-json wrote") from None
    if not isinstance(body, dict) or body.get("schema") != SCHEMA:
        raise ConfigError(
            f"{file} is not the summary of a throughput run", "give what --output-json wrote"
        )
    if body.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{file} has schema version {body.get('schema_version')}, this is {SCHEMA_VERSION}",
            "measure both again",
        )
    return body


def differences(base: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Settings that are not the same in both; a checkpoint counts by its digest, not its name."""
    a, b = base["settings"], new["settings"]
    names = [name for name in dict.fromkeys((*a, *b)) if f"{name}_digest" not in a]
    return [
        f"{name.replace('_', '-')}: {a.get(name)!r} in A, {b.get(name)!r} in B"
        for name in names
        if a.get(name) != b.get(name)
    ]


def compare(base: Mapping[str, Any], new: Mapping[str, Any], *, allow_different: bool) -> str:
    """A Markdown table: per batch size A, B and the change in percent.

    Args:
        base: The summary of A.
        new: The summary of B.
        allow_different: Compare although settings differ; they are listed above the table.

    Raises:
        ConfigError: Settings differ, or the runs share no batch size.
    """
    different = differences(base, new)
    if different and not allow_different:
        raise ConfigError(
            "the runs have other settings: " + "; ".join(different),
            "measure both alike, or add --allow-different to compare all the same",
        )
    ours = {point["max_num_seqs"]: point for point in base["points"]}
    theirs = {point["max_num_seqs"]: point for point in new["points"]}
    shared = [width for width in ours if width in theirs]
    if not shared:
        raise ConfigError("the runs share no batch size", "measure both with one --max-num-seqs")
    names = ["speed-up", *_MEASURES]
    rows = [[str(width), *_row(ours[width], theirs[width])] for width in shared]
    used = [at for at in range(len(names)) if any(row[at + 1] for row in rows)]
    kept = [[row[0], *[row[at + 1] for at in used]] for row in rows]
    head = "".join(f"- {line}\n" for line in different)
    if head:
        head = f"Settings differ:\n\n{head}\n"
    return head + markdown(["at once", *[names[at] for at in used]], kept) + _LEGEND


_LEGEND = (
    "\nEach cell: A -> B (change). Whole passes; a change within the spread of the speed-up over "
    "pairs is noise.\n"
)


def _row(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    cells = [_cell(_at(ours, ("speedup", "mean")), _at(theirs, ("speedup", "mean")), True)]
    for mode, path, more in _MEASURES.values():
        cells.append(_cell(_at(ours, (mode, *path)), _at(theirs, (mode, *path)), more))
    return cells


def _at(value: Any, path: tuple[str, ...]) -> float | None:
    for name in path:
        if value is None:
            return None
        value = value.get(name)
    return None if value is None else float(value)


def _cell(a: float | None, b: float | None, more_is_better: bool) -> str:
    """`12.3 -> 14.5 (+17.9 %)`; a change for the worse of over 1 % is marked `!`."""
    if a is None or b is None:
        return ""
    if not a:
        return f"{a:.3g} -> {b:.3g}"
    change = 100 * (b / a - 1)
    worse = change < -1 if more_is_better else change > 1
    digits = 2 if max(a, b) < 10 else 1
    return f"{a:.{digits}f} -> {b:.{digits}f} ({change:+.1f} %{' !' if worse else ''})"
