"""`--dry-run`: everything that can be known of the input without weights."""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark_cli.prepare import identify
from dspark_cli.reader import Rows
from dspark_cli.rows import RowRules, TextTokenizer, encode_prompt, read_row
from dspark_cli.sharding import Shard
from engine.errors import ConfigError, RequestError
from engine.outcomes import check_request
from engine.request import Request

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


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a target can take, as far as its folder says."""

    max_model_len: int | None
    """Prompt plus output tokens of a row."""

    trained: int | None
    """What that can be at most."""

    vocab_size: int | None

    @classmethod
    def of(cls, folder: Path, max_model_len: int | None) -> "Bounds":
        """Read a checkpoint's config.

        Args:
            folder: The target's.
            max_model_len: As asked for.
        """
        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
            config = config.get("text_config") or config
        except (OSError, ValueError, AttributeError):
            config = {}
        trained, vocab_size = (
            value if isinstance(value := config.get(name), int) else None
            for name in ("max_position_embeddings", "vocab_size")
        )
        lengths = [n for n in (max_model_len, trained) if n is not None]
        return cls(min(lengths, default=None), trained, vocab_size)

    def check_stop_tokens(self, ids: Iterable[int]) -> None:
        """Refuse ids of the command line that no row could use.

        Raises:
            ConfigError: One is outside the vocabulary.
        """
        for token in ids:
            if self.vocab_size is not None and token >= self.vocab_size:
                raise ConfigError(
                    f"--stop-token-id {token} is outside the vocabulary [0, {self.vocab_size})",
                    "use ids of the target's tokenizer",
                )


def examine(
    rows: Rows,
    rules: RowRules,
    tokenizer: TextTokenizer,
    chat_template: str | None,
    bounds: Bounds,
    shard: Shard | None = None,
) -> InputReport:
    """Read all rows as a run would, up to the engine.

    Args:
        rows: The input.
        rules: The command line's choices.
        tokenizer: The target's.
        chat_template: Used in place of the model's.
        bounds: The target's.
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
            _examine_row(str(row_id), fields, rules, tokenizer, chat_template, bounds, report, seen)
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
    bounds: Bounds,
    report: InputReport,
    seen: set[str],
) -> None:
    if row_id in seen:
        raise RequestError("duplicate_id", f"the id {row_id!r} was used before", "make ids unique")
    seen.add(row_id)
    row = read_row(fields, rules)
    ids = encode_prompt(row.prompt, tokenizer, chat_template)
    request = Request(request_id=row_id, prompt_token_ids=tuple(ids), params=row.params)
    most, count = bounds.max_model_len, len(ids)
    check_request(request, most or sys.maxsize, bounds.vocab_size or sys.maxsize, bounds.trained)
    report.lines += row.n
    report.raw_prompts += row.prompt.text is not None
    report.conversations += bool(row.prompt.later)
    report.tokens[0] += count
    report.tokens[1] = max(report.tokens[1], count)
    turns = 1 + len(row.prompt.later)
    room = count + turns * row.params.max_tokens if most is None else most
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
