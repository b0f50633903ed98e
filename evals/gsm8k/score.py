"""From texts to verdicts and counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from evals.gsm8k.data import Problem
from evals.gsm8k.extract import EXTRACTORS, Reading, find_signed, read_all
from evals.gsm8k.presets import Preset
from evals.numbers import ratio, rounded
from evals.stats import wilson


class Outcome(StrEnum):
    """What became of a row; exactly one holds, the first that fits."""

    error = "error"
    """No text: the row failed. Never counted as an answer."""

    correct = "correct"
    truncated = "truncated"
    """Not right, and cut at the token limit."""

    no_answer = "no_answer"
    """Ended by itself, and the headline extractor found nothing."""

    wrong = "wrong"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model gave for one problem."""

    problem: Problem
    text: str
    finish_reason: str | None = None
    """`stop`, `length`, or None if unknown."""

    error: str | None = None
    """Why there is no text."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row, scored with every extractor."""

    answer: Answer
    text: str
    """What was read: cut at the preset's stop strings."""

    outcome: Outcome
    readings: dict[str, Reading]
    ambiguous: bool
    """See extract.Signed."""

    @property
    def row_id(self) -> str:
        """Name of the row."""
        return str(self.answer.problem.index)

    @property
    def correct(self) -> bool:
        """By the headline extractor."""
        return self.outcome is Outcome.correct


def judge(answer: Answer, preset: Preset) -> Verdict:
    """Score one row."""
    text = cut(answer.text, preset.stop)
    readings = dict(read_all(text, answer.problem.answer, preset.rules))
    headline = readings[preset.headline]
    if answer.error is not None:
        outcome = Outcome.error
    elif headline.correct:
        outcome = Outcome.correct
    elif answer.finish_reason == "length":
        outcome = Outcome.truncated
    else:
        outcome = Outcome.no_answer if headline.text is None else Outcome.wrong
    return Verdict(answer, text, outcome, readings, find_signed(text).ambiguous)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over some rows."""

    verdicts: tuple[Verdict, ...]
    headline: str

    @property
    def answered(self) -> list[Verdict]:
        """Rows with a text: what accuracy is a share of."""
        return [v for v in self.verdicts if v.outcome is not Outcome.error]

    @property
    def correct(self) -> int:
        """Right by the headline extractor."""
        return sum(v.correct for v in self.verdicts)

    @property
    def accuracy(self) -> float | None:
        """Correct / answered."""
        return ratio(self.correct, len(self.answered))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % Wilson interval of the accuracy."""
        return wilson(self.correct, len(self.answered))

    def outcomes(self) -> dict[str, int]:
        """Rows by outcome; they sum to all rows."""
        counts = Counter(v.outcome for v in self.verdicts)
        return {outcome.value: counts[outcome] for outcome in Outcome}

    def extractors(self) -> dict[str, dict[str, Any]]:
        """Each extractor's verdicts over the rows with a text."""
        rows = self.answered
        return {
            name: {
                "correct": sum(v.readings[name].correct for v in rows),
                "accuracy": rounded(ratio(sum(v.readings[name].correct for v in rows), len(rows))),
                "found_an_answer": sum(v.readings[name].text is not None for v in rows),
                "differs_from_headline": sum(
                    v.readings[name].correct != v.readings[self.headline].correct for v in rows
                ),
            }
            for name in EXTRACTORS
        }

    def as_json(self) -> dict[str, Any]:
        """For `summary.json`."""
        return {
            "rows": len(self.verdicts),
            "answered": len(self.answered),
            **self.outcomes(),
            "cut_at_the_limit": sum(v.answer.finish_reason == "length" for v in self.verdicts),
            "ambiguous": sum(v.ambiguous for v in self.answered),
            "accuracy": rounded(self.accuracy),
            "accuracy_interval_95": [rounded(x) for x in self.interval or ()],
            "headline_extractor": self.headline,
            "extractors": self.extractors(),
        }

    def without(self, first: int) -> "Score":
        """The same without the first rows of the file."""
        kept = tuple(v for v in self.verdicts if v.answer.problem.index >= first)
        return Score(kept, self.headline)
