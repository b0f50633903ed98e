"""Is drafted greedy output the plain greedy output? Where not: a near tie, or a bug.

Verifying checks several positions in one pass, plain decoding one; the two use other shapes of the
same products, whose sums round differently. Where two tokens are nearly equally likely, that may
turn the choice, and everything after it differs. Such a row is a `tie`. Any other difference is a
`bug`: no rounding moves a logit that far.

A row's first difference is judged by the target's own logits after the common prefix, computed
anew: it is a tie if both tokens are within the bound below of the most likely one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from engine.request import Completion
from evals.arm import DRAFTED, PLAIN, Arm
from evals.charts import bars
from evals.metrics import request_json
from evals.numbers import ratio, rounded
from evals.page import Block, Charts, Code, Fact, Page, Section, Table, Text
from evals.report import Report, acceptance_section

KIND = "eval-lossless"

TIE_BELOW = {"float32": 0.001, "float16": 0.0625, "bfloat16": 0.5}
"""Logits closer than this may swap, by dtype: some ten units in the last place of a logit near 20
in float32 and float16, where noise comes from long sums; four in bfloat16, whose steps there are
0.125 and whose noise is the rounding of every layer's output."""

TOP = 8
"""How many of the most likely tokens are asked for; a token that is not among them is no tie."""

TopLogits = Callable[[Sequence[int], int], list[tuple[int, float]]]


class Kind(StrEnum):
    """What a row is; exactly one holds."""

    equal = "equal"
    tie = "tie"
    bug = "bug"
    error = "error"
    """One side has no output; nothing can be said."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row's outcome; what is after `kind` is None without a difference."""

    row_id: str
    kind: Kind
    position: int | None = None
    """First output token that differs, from 0."""

    drafted_token: int | None = None
    """None if the drafted output had ended there."""

    plain_token: int | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logit) of the two most likely after the common prefix."""

    gap: float | None = None
    """First minus second of `top`."""

    behind: float | None = None
    """Most likely logit minus that of the less likely of the two tokens; None: not in the top."""

    why: str = ""


def compare(drafted: Completion, plain: Completion, top_logits: TopLogits, bound: float) -> Row:
    """Judge one row.

    Args:
        drafted: Output with the drafter.
        plain: Output without it, for the same prompt, both greedy.
        top_logits: The engine's.
        bound: Logits closer than this may swap.
    """
    name, a, b = drafted.request.request_id, drafted.token_ids, plain.token_ids
    if a == b:
        return Row(name, Kind.equal)
    at = next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    prefix = (*drafted.request.prompt_token_ids, *a[:at])
    logits = top_logits(prefix, TOP)
    best, found = logits[0][1], dict(logits)
    first = a[at] if at < len(a) else None
    second = b[at] if at < len(b) else None
    behind = None
    if first is not None and second is not None and first in found and second in found:
        behind = best - min(found[first], found[second])
    tie = behind is not None and behind < bound
    if first is None or second is None:
        why = "one output ended where the other went on"
    elif behind is None:
        why = f"a token is not among the {TOP} most likely"
    else:
        why = f"{behind:.3g} behind the most likely, bound {bound:g}"
    kind = Kind.tie if tie else Kind.bug
    top = tuple(logits[:2])
    return Row(name, kind, at, first, second, top, best - logits[1][1], behind, why)


def compare_all(
    order: Sequence[str], arms: Mapping[str, Arm], top_logits: TopLogits, bound: float
) -> list[Row]:
    """Judge all rows, in order."""
    drafted, plain = arms[DRAFTED], arms[PLAIN]
    rows = []
    for name in order:
        if name in drafted.done and name in plain.done:
            rows.append(compare(drafted.done[name], plain.done[name], top_logits, bound))
        else:
            why = drafted.failed.get(name) or plain.failed.get(name) or "no output came back"
            rows.append(Row(name, Kind.error, why=why))
    return rows


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    rows: Sequence[Row]
    arms: Mapping[str, Arm]
    dtype: str
    bound: float
    name: str
    """Of the input."""

    model: str
    draft: str
    token_text: Callable[[int], str]
    manifest: Mapping[str, Any]

    def count(self, kind: Kind) -> int:
        """Rows of a kind."""
        return sum(row.kind is kind for row in self.rows)

    @property
    def differing(self) -> list[Row]:
        """Ties and bugs."""
        return [row for row in self.rows if row.kind in (Kind.tie, Kind.bug)]

    def verdict(self) -> str:
        """One line."""
        bugs, ties, errors = (self.count(k) for k in (Kind.bug, Kind.tie, Kind.error))
        judged = len(self.rows) - errors
        tail = f"; {errors} rows without output" if errors else ""
        if bugs:
            return f"NOT lossless: {bugs} of {judged} rows differ by more than a near tie{tail}"
        if ties:
            return (
                f"lossless up to near ties: {ties} of {judged} rows differ, each first where two "
                f"tokens are within {self.bound:g} in the logits ({self.dtype}){tail}"
            )
        return f"lossless: all {judged} rows are equal token for token ({self.dtype}){tail}"


def make_report(result: Result) -> Report:
    """All five files."""
    summary = {
        "verdict": result.verdict(),
        "model": result.model,
        "draft": result.draft,
        "data": {"name": result.name, "rows_asked": len(result.rows)},
        "dtype": result.dtype,
        "tie_below": result.bound,
        "rows": {kind.value: result.count(kind) for kind in Kind},
        DRAFTED: result.arms[DRAFTED].as_json(),
        PLAIN: result.arms[PLAIN].as_json(),
        "differing": [_row_json(row, result) for row in result.differing],
    }
    return Report(
        kind=KIND,
        summary=summary,
        per_request=[_request(index, row, result) for index, row in enumerate(result.rows)],
        matrix=[
            {
                "dtype": result.dtype,
                "tie_below": result.bound,
                **{kind.value: result.count(kind) for kind in Kind},
                "drafted_tokens_per_second": rounded(result.arms[DRAFTED].speed),
                "plain_tokens_per_second": rounded(result.arms[PLAIN].speed),
            }
        ],
        manifest=result.manifest,
        page=_page(result),
    )


def _row_json(row: Row, result: Result) -> dict[str, Any]:
    found = asdict(row)
    for name in ("drafted_token", "plain_token"):
        token = found[name]
        found[f"{name}_text"] = None if token is None else result.token_text(token)
    return {**found, "gap": rounded(row.gap), "behind": rounded(row.behind)}


def _request(index: int, row: Row, result: Result) -> dict[str, Any]:
    done = result.arms[DRAFTED].done.get(row.row_id)
    measured = {} if done is None else request_json(done)
    return {"index": index, "id": row.row_id, **_row_json(row, result), **measured}


def _page(result: Result) -> Page:
    speeds = [result.arms[name].speed for name in (DRAFTED, PLAIN)]
    facts = [Fact(kind.value, str(result.count(kind))) for kind in Kind]
    if speeds[0] and speeds[1]:
        note = f"{speeds[0]:,.0f} against {speeds[1]:,.0f} tokens/s"
        facts.append(Fact("speed-up", f"{ratio(speeds[0], speeds[1]):.2f} x", note))
    blocks: list[Block] = [
        Text(_sentence(result.verdict()), warning=result.count(Kind.bug) > 0),
        Text(
            "Greedy decoding with and without the drafter, in one engine. A difference is a tie "
            f"if both tokens are within {result.bound:g} of the most likely one in the target's "
            f"logits after the common prefix (the bound for {result.dtype}), else a bug."
        ),
    ]
    if result.differing:
        shown = result.differing[:200]
        columns = ("row", "verdict", "at token", "drafted", "plain", "top-two gap", "why")
        blocks.append(Table(columns, [_cells(row, result) for row in shown], words=True))
        blocks.append(
            Charts(
                [
                    bars(
                        "How far the less likely token is behind",
                        [row.row_id for row in shown],
                        {"logits": [row.behind for row in shown]},
                        x_label="row",
                        y_label="logits",
                    )
                ]
            )
        )
    sections = [
        Section("First differences", blocks),
        acceptance_section(result.arms[DRAFTED].acceptance),
        Section("How it ran", [Code(str(result.manifest.get("command", "")))]),
    ]
    return Page(
        title="Is drafted output the plain output?",
        lead=f"{result.model} with {result.draft}, {len(result.rows)} rows of {result.name}",
        facts=facts,
        sections=[section for section in sections if section is not None],
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _cells(row: Row, result: Result) -> list[str]:
    tokens = [
        "end" if token is None else repr(result.token_text(token))
        for token in (row.drafted_token, row.plain_token)
    ]
    gap = "" if row.gap is None else f"{row.gap:.3g}"
    return [row.row_id, row.kind.value, str(row.position), *tokens, gap, row.why]
