"""`--dry-run`: everything that can be known of the input without weights."""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_cli.prepare import identify
from dspark_cli.reader import Rows
from dspark_cli.rows import RowRules, TextTokenizer, encode_prompt, read_row
from dspark_cli.sharding import Shard
from engine.errors import RequestError

SHOWN_ERRORS = 20


@dataclass(slots=True)
class InputReport:
    """What the rows hold."""

    rows: int = 0
    lines: int = 0
    """Output lines: rows times samples."""
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    """Prompt tokens in all, and of the longest row."""
    output_limit: int = 0
    """Sum of max_tokens."""
    errors: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    first_prompt: str | None = None
    raw_prompts: int = 0
    """Rows whose `prompt` is continued as it is."""
    conversations: int = 0
    """Rows with several turns, of which only the first has a known prompt."""


def context_length(folder: Path, max_model_len: int | None) -> int | None:
    """Prompt plus output tokens of a row, as far as it is known without the engine."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        trained = int((config.get("text_config") or config)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return max_model_len
    return trained if max_model_len is None else min(trained, max_model_len)


def examine(
    rows: Rows,
    rules: RowRules,
    tokenizer: TextTokenizer,
    chat_template: str | None,
    max_model_len: int | None,
    shard: Shard | None = None,
) -> InputReport:
    """Read all rows as a run would, up to the engine.

    Args:
        rows: The input.
        rules: The command line's choices.
        tokenizer: The target's.
        chat_template: Used in place of the model's.
        max_model_len: Prompt and output tokens of a row; None if unknown.
        shard: Rows of other shards are passed over.
    """
    report = InputReport()
    seen: set[str] = set()
    for raw in rows:
        row_id, fields, wrong = identify(raw)
        if shard is not None and not shard.holds(str(raw.index) if row_id is None else row_id):
            continue
        report.rows += 1
        try:
            if wrong is not None:
                raise wrong
            _examine_row(
                str(row_id), fields, rules, tokenizer, chat_template, max_model_len, report, seen
            )
        except RequestError as error:
            report.errors[error.kind] += 1
            if len(report.examples) < SHOWN_ERRORS:
                report.examples.append(f"line {raw.line}: {error.kind}: {error}; {error.hint}")
    return report


def _examine_row(
    row_id: str,
    fields: dict[str, Any],
    rules: RowRules,
    tokenizer: TextTokenizer,
    chat_template: str | None,
    max_model_len: int | None,
    report: InputReport,
    seen: set[str],
) -> None:
    if row_id in seen:
        raise RequestError("duplicate_id", f"the id {row_id!r} was used before", "make ids unique")
    seen.add(row_id)
    row = read_row(fields, rules)
    count = len(encode_prompt(row.prompt, tokenizer, chat_template))
    if max_model_len is not None and count >= max_model_len:
        raise RequestError(
            "too_long",
            f"{count} prompt tokens leave no room for output in {max_model_len}",
            "shorten the prompt, or raise --max-model-len",
        )
    report.lines += row.n
    report.raw_prompts += row.prompt.text is not None
    report.conversations += bool(row.prompt.later)
    report.tokens[0] += count
    report.tokens[1] = max(report.tokens[1], count)
    turns = 1 + len(row.prompt.later)
    room = count + turns * row.params.max_tokens if max_model_len is None else max_model_len
    report.output_limit += row.n * min(turns * row.params.max_tokens, room - count)
    if report.first_prompt is None:
        report.first_prompt = row.prompt.render(tokenizer, chat_template)


def print_report(report: InputReport) -> None:
    """To stdout: it is what the command was asked for."""
    good = report.rows - report.errors.total()
    mean = report.tokens[0] / good if good else 0.0
    lines = [
        f"rows            {report.rows}",
        f"good            {good} ({report.lines} completions)",
        f"prompt tokens   {report.tokens[0]} (mean {mean:.1f}, longest {report.tokens[1]})",
        f"output tokens   {report.output_limit} at most",
        f"bad             {report.errors.total()}",
        *(f"  {kind:<13} {count}" for kind, count in report.errors.most_common()),
        *(f"  {example}" for example in report.examples),
    ]
    if report.conversations:
        lines.append(f"conversations   {report.conversations} (prompts of the first turn counted)")
    if report.raw_prompts:
        lines.append(f"continued as is {report.raw_prompts} (a `prompt`; --chat asks it as a user)")
    if report.first_prompt is not None:
        lines += ["first prompt, as the model sees it:", report.first_prompt]
    text = "\n".join(lines) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
