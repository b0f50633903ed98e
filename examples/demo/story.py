"""A story under construction: sentences of the question, lines of the worked answer."""

import random
from typing import NamedTuple

from examples.demo import words

TOP = 999


class OutOfRangeError(Exception):
    """A number left the range the demo teaches; the story is thrown away."""


class Person(NamedTuple):
    name: str
    he: str
    his: str
    him: str

    @property
    def He(self) -> str:  # noqa: N802 - a capital letter is what it returns
        return self.he.capitalize()


class Story:
    """Text so far, the running value, and draws from the random stream."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.value = 0
        self.steps = 0
        self._names = rng.sample(
            [Person(n, "she", "her", "her") for n in words.SHE]
            + [Person(n, "he", "his", "him") for n in words.HE],
            4,
        )

    def person(self) -> Person:
        """Somebody who is not in the story yet."""
        if not self._names:
            raise OutOfRangeError
        return self._names.pop()

    def num(self, low: int, high: int) -> int:
        if high < low:
            raise OutOfRangeError
        return self.rng.randint(low, high)

    def pick(self, *options: str) -> str:
        """One of several ways to say it, all equally likely."""
        return self.rng.choice(options)

    def usual(self, *options: str) -> str:
        """One of several ways to say it, the first one mostly."""
        if self.rng.random() < 0.8:
            return options[0]
        return self.rng.choice(options[1:])

    def divisor(self, value: int, low: int = 2, high: int = 12) -> int:
        """A number from low to high that divides value."""
        fits = [k for k in range(low, high + 1) if value % k == 0 and value // k > 1]
        if not fits:
            raise OutOfRangeError
        return self.rng.choice(fits)

    def tell(self, *options: str) -> None:
        self.sentences.append(self.pick(*options))

    def work(self, text: str, *ways: str) -> int:
        """Do a step: ``text`` is the arithmetic; ways to say it hold ``{}`` where it belongs.

        Returns the result and makes it the running value.
        """
        left, sign, right = text.split(" ")
        a, b = int(left), int(right)
        if sign == "/" and (b == 0 or a % b):
            raise OutOfRangeError
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[sign]
        if not 0 < result <= TOP:
            raise OutOfRangeError
        line = self.usual(*ways) if len(ways) > 1 else ways[0]
        self.lines.append(line.replace("{}", f"{text} = {result}"))
        self.value = result
        self.steps += 1
        return result

    def row(self) -> dict[str, str]:
        answer = "\n".join([*self.lines, f"#### {self.value}"])
        return {"question": " ".join(self.sentences), "answer": answer}
