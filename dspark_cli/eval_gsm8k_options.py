"""The options of `dspark eval gsm8k`, and the recipe they mean."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from dspark_cli.eval_options import ComparePlain, EvalOptions, Out
from dspark_cli.options import EVALUATION, SAMPLING, option
from dspark_cli.parsers import sampling, whole
from dspark_cli.sampling_options import MinP, TopK, TopP
from engine.errors import ConfigError
from evals.gates import Gate, parse_gates
from evals.gsm8k.data import HUB_TEST, HUB_TRAIN
from evals.gsm8k.presets import PRESETS, Preset, find_preset
from evals.gsm8k.result import GATES, NEEDS_MODEL, NEEDS_PLAIN

PresetName = Annotated[
    str | None,
    option(
        EVALUATION,
        f"The recipe: {', '.join(PRESETS)}. It fixes prompt, shots, stops, limits and extractor. "
        "Default: boxed; question for --model demo and --rescore.",
        metavar="NAME",
    ),
]
Data = Annotated[
    str,
    option(
        EVALUATION,
        "Problems: a JSONL or parquet file of question and answer, or a Hugging Face data set "
        "(downloaded once, then taken from its cache).",
        metavar="FILE",
    ),
]
ShotsData = Annotated[
    str,
    option(
        EVALUATION,
        "Training rows that presets with shots show (lm-eval and vllm).",
        metavar="FILE",
    ),
]
Shots = Annotated[
    int | None,
    option(EVALUATION, "Worked examples, in place of the preset's.", parser=whole(0), metavar="N"),
]
MaxTokens = Annotated[
    int | None,
    option(
        SAMPLING,
        "Output tokens, in place of the preset's.",
        parser=sampling("max_tokens"),
        metavar="N",
    ),
]
Temperature = Annotated[
    float | None,
    option(
        SAMPLING,
        "In place of the preset's; 0 is greedy.",
        parser=sampling("temperature"),
        metavar="T",
    ),
]
Seed = Annotated[
    int | None,
    option(SAMPLING, "In place of the preset's.", parser=sampling("seed"), metavar="N"),
]
Gates = Annotated[
    list[str] | None,
    option(
        EVALUATION,
        "Exit with 4 unless this holds, as 'acc>=0.87' or 'mcnemar>0.05,al>=3.5'; repeatable. "
        "Names: " + ", ".join(GATES) + ".",
        metavar="EXPR",
    ),
]
Rescore = Annotated[
    Path | None,
    option(
        EVALUATION,
        "Score the texts in this file, lines of index and text (output of dspark generate will "
        "do); no model is loaded.",
        exists=True,
        dir_okay=False,
        metavar="ROWS.jsonl",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Gsm8kOptions(EvalOptions):
    """The command's parameters."""

    preset: PresetName = None
    data: Data = HUB_TEST
    shots_data: ShotsData = HUB_TRAIN
    shots: Shots = None
    compare_plain: ComparePlain = False
    gate: Gates = None
    rescore: Rescore = None
    max_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = None
    out: Out = Path("gsm8k")

    def recipe(self) -> tuple[Preset, str]:
        """The preset with what was changed of it, and its name in reports."""
        plain = self.model == "demo" or self.rescore is not None
        default = "question" if plain else "boxed"
        preset = find_preset(self.preset or default)
        given: dict[str, Any] = {
            "num_shots": self.shots,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        changed = {k: v for k, v in given.items() if v is not None and v != getattr(preset, k)}
        if preset.shots == "none" and self.shots:
            raise ConfigError(f"the preset {preset.name} has no shots", "drop --shots")
        custom = bool(changed) or (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)
        return replace(preset, **changed), preset.name + ("+custom" if custom else "")

    def gates(self) -> list[Gate]:
        """What --gate says.

        Raises:
            ConfigError: It says nothing that this run measures.
        """
        names = dict(GATES)
        if not self.compare_plain:
            names = {k: v for k, v in names.items() if k not in NEEDS_PLAIN}
        if self.rescore is not None:
            names = {k: v for k, v in names.items() if k not in NEEDS_MODEL}
        return parse_gates(self.gate or [], names)

    def check(self) -> None:
        """Refuse what contradicts itself before anything is loaded.

        Raises:
            ConfigError: A combination makes no sense.
        """
        rescoring = self.rescore is not None
        wrong = (
            (not rescoring and self.model is None, "no --model", "give --model, or --rescore FILE"),
            (
                rescoring and (self.model is not None or self.draft is not None),
                "--rescore uses no model",
                "drop --model and --draft",
            ),
            (rescoring and self.compare_plain, "--rescore decodes nothing to compare", "drop it"),
        )
        for holds, message, hint in wrong:
            if holds:
                raise ConfigError(message, hint)
