"""Problems from rows of the GSM8K format, and whether they are the known test or training set."""

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from evals.gsm8k.extract import gold_value

HUB_TEST = "openai/gsm8k@main:test"
HUB_TRAIN = "openai/gsm8k@main:train"

# Rows and content of the published files (config `main`): see `content_hash`.
KNOWN = {
    "test": (1319, "5b736e25f3d1e6cdeef6b3d89e3dc71a7e3c20288f93f1bda635f6fbeb4f41b5"),
    "train": (7473, "937e90ecc5698135a95d098621de3388f3b63bec4dbd8fc1b349adf8612890aa"),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its reference solution."""

    index: int
    """Row in its file, from 0; also its id."""

    question: str
    answer: str
    """The solution, ending in `#### N`."""


@dataclass(frozen=True, slots=True)
class Problems:
    """All problems of one file, in its order."""

    name: str
    """Where they came from."""

    rows: tuple[Problem, ...]

    @property
    def content_hash(self) -> str:
        """See `content_hash`."""
        return content_hash(self.rows)

    @property
    def known_as(self) -> str | None:
        """`test` or `train` if this is exactly that published set."""
        found = (len(self.rows), self.content_hash)
        return next((name for name, known in KNOWN.items() if known == found), None)

    def statement(self) -> str:
        """What the data is, for people."""
        known = self.known_as
        if known is not None:
            return (
                f"{self.name}: the GSM8K {known} set, {len(self.rows)} rows, content as published"
            )
        rows, digest = len(self.rows), self.content_hash[:12]
        if rows == KNOWN["test"][0]:
            return (
                f"{self.name}: {rows} rows as in the GSM8K test set, but other content (sha256 "
                f"{digest}...): the score does not compare with published ones"
            )
        return (
            f"{self.name}: not the GSM8K test set ({rows} rows, not {KNOWN['test'][0]}; sha256 "
            f"{digest}...): the score does not compare with published ones"
        )


def content_hash(rows: Iterable[Problem]) -> str:
    """sha256 of [question, answer] of each row as JSON, a line each; layout does not matter."""
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps([row.question, row.answer]).encode() + b"\n")
    return total.hexdigest()


def read_problems(name: str, rows: Iterable[tuple[int, Mapping[str, Any]]]) -> Problems:
    """Understand rows.

    Args:
        name: Where they come from.
        rows: (line, fields) of each.

    Raises:
        ConfigError: A row is not of the format; the message says which.
    """
    found: list[Problem] = []
    for line, fields in rows:
        question, answer = fields.get("question"), fields.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise ConfigError(
                f"{name}, line {line}: a row needs the texts question and answer, this one has "
                f"{', '.join(fields) or 'nothing'}",
                'write rows as {"question": "...", "answer": "... #### 18"}',
            )
        if gold_value(answer) is None:
            raise ConfigError(
                f"{name}, line {line}: the answer ends in no number", "end it with #### N"
            )
        found.append(Problem(len(found), question, answer))
    if not found:
        raise ConfigError(f"{name} holds no rows", 'write {"question": ..., "answer": ...} lines')
    return Problems(name, tuple(found))


def choose(rows: Sequence[Problem], sample: int | None, seed: int) -> list[Problem]:
    """All rows, or the first `sample` after Python's seeded shuffle where there are more."""
    chosen = list(rows)
    if sample is not None and len(chosen) > sample:
        random.Random(seed).shuffle(chosen)
        chosen = chosen[:sample]
    return chosen
