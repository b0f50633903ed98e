"""Grade-school story problems with worked answers, made from a seed.

A row is ``{"question", "answer"}``. The answer has one step a line, each with its arithmetic
(``12 * 7 = 84``), and ends in ``#### N``. Whole numbers from 0 to 999 only. A question belongs to
the held-out split if a hash of its text says so, so the two splits cannot share a question.
"""

import hashlib
import random
import re
from collections.abc import Iterator

from examples.demo import stories, stories_more
from examples.demo.story import OutOfRangeError, Story

FAMILIES = {
    stories.pile: 5,
    stories.shopping: 2,
    stories.wages: 1,
    stories.ages: 1,
    stories_more.travel: 1,
    stories_more.reading: 1,
    stories_more.groups: 1,
    stories_more.makers: 2,
    stories_more.halls: 1,
    stories_more.recipes: 1,
}
HELD_OUT_ONE_IN = 50
MAX_STEPS = 4
STEP = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+)")


def is_held_out(question: str) -> bool:
    """Whether the hash of the text puts a question into the held-out split."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def make_problem(rng: random.Random) -> dict[str, str]:
    """One problem of either split; every number of steps is equally likely."""
    steps = rng.randint(1, MAX_STEPS)
    while True:
        story = Story(rng)
        try:
            rng.choices(list(FAMILIES), list(FAMILIES.values()))[0](story, steps)
        except OutOfRangeError:
            continue
        if story.steps == steps:
            return story.row()


def problems(seed: int | str, *, held_out: bool) -> Iterator[dict[str, str]]:
    """Endless problems of one split, the same for the same seed, no question twice in a row."""
    rng = random.Random(f"demo-{seed}-{held_out}")
    while True:
        row = make_problem(rng)
        if is_held_out(row["question"]) == held_out:
            yield row


def take(seed: int | str, count: int, *, held_out: bool) -> list[dict[str, str]]:
    """The first ``count`` different problems of a split."""
    seen: dict[str, dict[str, str]] = {}
    for row in problems(seed, held_out=held_out):
        seen.setdefault(row["question"], row)
        if len(seen) == count:
            break
    return list(seen.values())


def count_steps(answer: str) -> int:
    """How many steps of arithmetic a worked answer has."""
    return len(STEP.findall(answer))


def final_number(text: str) -> str | None:
    """What stands after ``####``, or None."""
    found = re.search(r"#### (-?\d+)", text)
    return found.group(1) if found else None
