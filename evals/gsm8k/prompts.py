"""From problems and a preset to the text that a model gets."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from evals.gsm8k.data import Problem
from evals.gsm8k.presets import COT_SHOTS, Preset

_LM_EVAL_SEED = 1234


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one row asks: text to continue, or the one user message of a chat."""

    problem: Problem
    text: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As a chat."""
        return [{"role": "user", "content": self.text}]


def needs_training_rows(preset: Preset) -> bool:
    """Whether the preset's shots come from the training set."""
    return preset.num_shots > 0 and preset.shots in ("random-train", "first-train")


def leaked(preset: Preset) -> int:
    """How many of the first rows under test are shown, with their answers, in every prompt."""
    return preset.num_shots if preset.shots == "first-test" else 0


def make_prompts(
    preset: Preset,
    chosen: Sequence[Problem],
    *,
    tested: Sequence[Problem],
    train: Sequence[Problem] = (),
) -> list[Prompt]:
    """The prompt of each chosen problem.

    Args:
        preset: The recipe.
        chosen: Problems to ask, in order; lm-eval's draws depend on the order.
        tested: All problems of the file they are from.
        train: The training set, for presets that take shots from it.

    Raises:
        ConfigError: There are fewer rows to show than the preset wants.
    """
    draws = random.Random(_LM_EVAL_SEED)
    count, pool = preset.num_shots, train if needs_training_rows(preset) else tested
    if preset.shots not in ("none", "fixed") and len(pool) < count:
        raise ConfigError(
            f"the preset {preset.name} shows {count} rows, there are only {len(pool)}",
            "give the training file with --shots-data",
        )
    prompts = []
    for problem in chosen:
        if preset.shots == "random-train":
            shown = _pairs(draws.sample(list(pool), count))
        elif preset.shots in ("first-train", "first-test"):
            shown = _pairs(pool[:count])
        else:
            shown = list(COT_SHOTS[:count]) if preset.shots == "fixed" else []
        prompts.append(Prompt(problem, _render(preset, shown, problem.question)))
    return prompts


def _pairs(rows: Sequence[Problem]) -> list[tuple[str, str]]:
    return [(row.question, row.answer) for row in rows]


def _render(preset: Preset, shown: Sequence[tuple[str, str]], question: str) -> str:
    shots = [
        preset.shot.replace("{prompt}", _ask(preset, asked)).replace("{answer}", answer)
        for asked, answer in shown
    ]
    return "".join(shots) + _ask(preset, question)


def _ask(preset: Preset, question: str) -> str:
    return preset.question.replace("{question}", question)
