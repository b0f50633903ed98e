"""How many draft tokens to verify: the two ways to choose, and what each is sound for.

rate(b) = (R + the b largest survivals) / milliseconds(R, R + b)
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def expected_tokens(survival: Floats) -> Floats:
    """[R * G + 1] tokens of a round that verifies the b largest survivals, b = 0 to R * G.

    Args:
        survival: [R, G] in [0, 1].

    Raises:
        ValueError: A survival is NaN or out of range.
    """
    check_survival(survival)
    gains = np.sort(survival, axis=None)[::-1]
    return len(survival) + np.concatenate(([0.0], np.cumsum(gains, dtype=np.float64)))


def check_survival(survival: Floats) -> None:
    """Refuse what is no survival.

    Raises:
        ValueError: One is NaN or out of range.
    """
    if not ((survival >= 0.0) & (survival <= 1.0)).all():
        raise ValueError("survival: must be in [0, 1] and not NaN")


def best_budget(tokens: Floats, milliseconds: Floats) -> int:
    """The budget with the highest rate; of equals the smallest. Sound on old survivals only.

    Args:
        tokens: [n] expected tokens by budget, from `expected_tokens`.
        milliseconds: [n] of a round by budget.
    """
    return int((tokens / milliseconds).argmax())


def first_drop_budget(tokens: Floats, milliseconds: Floats) -> int:
    """Algorithm 1: admit drafts one by one while the rate rises. Sound on current survivals.

    Args:
        tokens: As `best_budget`.
        milliseconds: As `best_budget`.
    """
    drops = np.flatnonzero(np.diff(tokens / milliseconds) <= 0.0)
    return int(drops[0]) if drops.size else len(tokens) - 1


def convex_below(ends: Ints, milliseconds: Floats) -> Floats:
    """The greatest convex curve that no time lies below, for `first_drop_budget`.

    Times rise in steps, from tier to tier and wherever a measurement was off: the first draft past
    a step pays for all of it, and Algorithm 1 would end there although those after it are nearly
    free. Along a convex curve the first drop is the only one. What a draft costs is settled before
    the round, as it is along the steps, so it is as sound.

    Args:
        ends: [n] budgets with which steps end, rising from 0.
        milliseconds: [n] of rounds with those budgets, rising.

    Returns:
        [last end + 1] milliseconds by budget.
    """
    hull: list[int] = []
    for at in range(len(ends)):
        while len(hull) > 1:
            first, last = hull[-2], hull[-1]
            rise = (milliseconds[last] - milliseconds[first]) * (ends[at] - ends[first])
            if rise < (milliseconds[at] - milliseconds[first]) * (ends[last] - ends[first]):
                break
            hull.pop()
        hull.append(at)
    return np.interp(np.arange(ends[-1] + 1), ends[hull], milliseconds[hull])
