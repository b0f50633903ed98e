"""GSM8K's published files, and completions made by hand.

The data set is not part of the project. It is looked for in $DSPARK_GSM8K, else beside the checkout
in ../shared/data/gsm8k; where there is none, the tests that need it are skipped and say so.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.request import Completion, FinishReason, Request, Round, Timing
from evals.gsm8k.data import Problem, read_problems

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("DSPARK_GSM8K", ROOT.parent / "shared" / "data" / "gsm8k"))


def gsm8k_lines(name: str) -> list[dict[str, Any]]:
    path = FOLDER / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no GSM8K data: {path} does not exist")
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


@pytest.fixture(scope="session")
def tested() -> tuple[Problem, ...]:
    return read_problems("test", enumerate(gsm8k_lines("test"), 1)).rows


@pytest.fixture(scope="session")
def train() -> tuple[Problem, ...]:
    return read_problems("train", enumerate(gsm8k_lines("train"), 1)).rows


@pytest.fixture(scope="session")
def solutions() -> list[dict[str, Any]]:
    return gsm8k_lines("example_model_solutions")


Make = Callable[..., Completion]


@pytest.fixture
def make() -> Make:
    """A completion from its rounds: a step a second, the first token at `admitted` + 1."""

    def build(
        name: str, rounds: list[tuple[int, int, int]], admitted: float = 0.0, plain: int = 0
    ) -> Completion:
        counts = [1, *(committed for _, _, committed in rounds), *[1] * plain]
        commits = tuple((admitted + 1 + k, count) for k, count in enumerate(counts))
        return Completion(
            request=Request(request_id=name, prompt_token_ids=(1, 2)),
            token_ids=tuple(range(sum(counts))),
            text="",
            finish_reason=FinishReason.STOP,
            stop_reason=None,
            num_cached_tokens=0,
            rounds=tuple(Round(*numbers) for numbers in rounds),
            timing=Timing(admitted, commits),
        )

    return build
