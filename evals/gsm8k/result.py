"""A finished GSM8K run, and what --gate may ask of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evals.arm import DRAFTED, PLAIN, Arm
from evals.gsm8k.data import Problems
from evals.gsm8k.presets import Preset
from evals.gsm8k.score import Score
from evals.stats import Paired, pair


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    preset: Preset
    label: str
    """The preset's name, with `+custom` if something of it was changed."""

    problems: Problems
    asked: int
    """Rows chosen."""

    arms: Mapping[str, Arm]
    """In order; the first is the one whose score is the headline."""

    scores: Mapping[str, Score]
    """By the arms' names."""

    example: str
    """The first row's prompt as the model gets it."""

    example_tokens: int | None
    model: str | None
    draft: str | None
    manifest: Mapping[str, Any]
    notes: Sequence[str] = ()
    gates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def arm(self) -> Arm:
        """The headline's."""
        return next(iter(self.arms.values()))

    @property
    def score(self) -> Score:
        """The headline's."""
        return self.scores[self.arm.name]

    @property
    def paired(self) -> Paired | None:
        """Drafted against plain, rows that both answered; None if only one ran."""
        if DRAFTED not in self.scores or PLAIN not in self.scores:
            return None
        sides = [
            {v.row_id: v.correct for v in self.scores[name].answered} for name in (DRAFTED, PLAIN)
        ]
        return pair(sides[0], sides[1])

    @property
    def equal_outputs(self) -> int | None:
        """Rows whose drafted and plain token ids are the same."""
        if DRAFTED not in self.arms or PLAIN not in self.arms:
            return None
        plain = self.arms[PLAIN].done
        drafted = self.arms[DRAFTED].done
        return sum(
            name in plain and plain[name].token_ids == c.token_ids for name, c in drafted.items()
        )

    def gate_values(self) -> dict[str, float | None]:
        """What --gate may name; see GATES."""
        acceptance, paired, score = self.arm.acceptance, self.paired, self.score
        outcomes = score.outcomes()
        return {
            "acc": score.accuracy,
            "acc_low": None if score.interval is None else score.interval[0],
            "acc_plain": self.scores[PLAIN].accuracy if PLAIN in self.scores else None,
            "mcnemar": None if paired is None else paired.p_value,
            "flips": None if paired is None else float(paired.flips),
            "al": acceptance.length,
            "al_per_request": acceptance.length_per_request,
            "toks": self.arm.speed,
            "errors": float(outcomes["error"]),
            "truncated": float(outcomes["truncated"]),
            "no_answer": float(outcomes["no_answer"]),
        }


GATES = {
    "acc": "accuracy of the headline extractor, 0 to 1 (or with %)",
    "acc_low": "lower end of its 95 % interval",
    "acc_plain": "accuracy without the drafter",
    "mcnemar": "p value of drafted against plain",
    "flips": "rows right on one side only",
    "al": "acceptance length, pooled",
    "al_per_request": "acceptance length, mean of the requests' own",
    "toks": "output tokens a second",
    "errors": "rows without an output",
    "truncated": "rows cut at the limit and not right",
    "no_answer": "rows that ended without an answer",
}
NEEDS_PLAIN = ("acc_plain", "mcnemar", "flips")
NEEDS_MODEL = ("al", "al_per_request", "toks")
