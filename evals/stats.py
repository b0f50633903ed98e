"""Intervals and tests for counts of right and wrong answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from evals.numbers import ratio, rounded

_Z = 1.959964  # two-sided 95 % of the normal distribution


def wilson(successes: int, total: int) -> tuple[float, float] | None:
    """95 % Wilson score interval of a share; stays in [0, 1] and holds near 0 and 1.

    Args:
        successes: Right answers.
        total: Answers; None comes back for 0.
    """
    if not total:
        return None
    share, square = successes / total, _Z * _Z
    middle = share + square / (2 * total)
    half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    under = 1 + square / total
    return max((middle - half) / under, 0.0), min((middle + half) / under, 1.0)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p value of McNemar's test.

    Under the null hypothesis a row that only one side got right is either side's with equal odds,
    so `only_first` is binomial; rows that both got right, or both wrong, say nothing.

    Args:
        only_first: Rows only the first side got right.
        only_second: Rows only the second side got right.

    Returns:
        In (0, 1]; 1 without discordant rows.
    """
    total, few = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, k) for k in range(few + 1))
    return float(min(1.0, 2 * tail / 2**total))


@dataclass(frozen=True, slots=True)
class Paired:
    """The same rows answered twice, drafted and plain."""

    both: int
    """Right both times."""

    neither: int
    only_drafted: tuple[str, ...]
    """Ids of rows right only with the drafter."""

    only_plain: tuple[str, ...]
    """Ids of rows right only without it."""

    @property
    def rows(self) -> int:
        """Rows answered by both without an error."""
        return self.both + self.neither + self.flips

    @property
    def flips(self) -> int:
        """Discordant rows."""
        return len(self.only_drafted) + len(self.only_plain)

    @property
    def p_value(self) -> float:
        """See `mcnemar`."""
        return mcnemar(len(self.only_drafted), len(self.only_plain))

    def as_json(self) -> dict[str, object]:
        """For `summary.json`."""
        drafted = self.both + len(self.only_drafted)
        plain = self.both + len(self.only_plain)
        return {
            "rows": self.rows,
            "both_correct": self.both,
            "neither_correct": self.neither,
            "only_drafted_correct": len(self.only_drafted),
            "only_plain_correct": len(self.only_plain),
            "accuracy_drafted": rounded(ratio(drafted, self.rows)),
            "accuracy_plain": rounded(ratio(plain, self.rows)),
            "mcnemar_p": rounded(self.p_value),
            "flipped_ids": {
                "only_drafted_correct": list(self.only_drafted),
                "only_plain_correct": list(self.only_plain),
            },
        }


def pair(drafted: Mapping[str, bool], plain: Mapping[str, bool]) -> Paired:
    """Compare verdicts by id; ids that one side lacks are left out."""
    common = [name for name in drafted if name in plain]
    return Paired(
        both=sum(drafted[name] and plain[name] for name in common),
        neither=sum(not drafted[name] and not plain[name] for name in common),
        only_drafted=tuple(n for n in common if drafted[n] and not plain[n]),
        only_plain=tuple(n for n in common if plain[n] and not drafted[n]),
    )
