"""Recipes, data and scoring of GSM8K."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ConfigError
from evals.gsm8k.data import KNOWN, Problem, Problems, choose, read_problems
from evals.gsm8k.presets import PRESETS, find_preset
from evals.gsm8k.prompts import leaked, make_prompts, needs_training_rows
from evals.gsm8k.score import Answer, Outcome, Score, judge

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", PRESETS)
def test_prompt_of_row_0(
    name: str, tested: tuple[Problem, ...], train: tuple[Problem, ...]
) -> None:
    """Row 0 under every recipe; the chat ones before the template.

    Golden files of lm-eval's five draws (first: Jen and Tyler) are those seen in its sample logs.
    """
    preset = PRESETS[name]
    (prompt,) = make_prompts(preset, tested[:1], tested=tested, train=train)
    assert prompt.text == (GOLDEN / f"{name}.txt").read_bytes().decode()
    assert prompt.text.count(tested[0].question) == (2 if leaked(preset) else 1)


def test_shots_come_from_the_training_rows(
    tested: tuple[Problem, ...], train: tuple[Problem, ...]
) -> None:
    asked = {row.question for row in tested}
    for preset in PRESETS.values():
        assert needs_training_rows(preset) == (preset.name in ("lm-eval", "vllm"))
        shown = make_prompts(preset, tested[:40], tested=tested, train=train)
        if preset.name != "sglang":
            others = [p.text.replace(p.problem.question, "", 1) for p in shown]
            assert not any(question in text for text in others for question in asked)


def test_every_lm_eval_row_has_shots_of_its_own(
    tested: tuple[Problem, ...], train: tuple[Problem, ...]
) -> None:
    prompts = make_prompts(PRESETS["lm-eval"], tested[:3], tested=tested, train=train)
    heads = {p.text.split("\n")[0] for p in prompts}
    assert len(heads) == 3
    fewer = make_prompts(PRESETS["lm-eval"], tested[:2], tested=tested, train=train)
    assert fewer == prompts[:2]


def test_deepspec_takes_its_500_rows(tested: tuple[Problem, ...]) -> None:
    preset = PRESETS["deepspec"]
    chosen = choose(tested, preset.sample, preset.seed)
    assert len({p.index for p in chosen}) == 500
    assert [p.index for p in chosen] != sorted(p.index for p in chosen)
    assert choose(tested[:100], preset.sample, preset.seed) == list(tested[:100])


def test_the_known_sets_are_recognised(
    tested: tuple[Problem, ...], train: tuple[Problem, ...]
) -> None:
    assert Problems("t", tested).known_as == "test"
    assert Problems("t", train).known_as == "train"
    assert "content as published" in Problems("t", tested).statement()
    changed = (replace(tested[0], answer="#### 19"), *tested[1:])
    assert Problems("t", changed).known_as is None
    assert "but other content" in Problems("t", changed).statement()
    assert f"not {KNOWN['test'][0]}" in Problems("t", tested[:200]).statement()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "x"}, "needs the texts question and answer"),
        ({"question": "x", "answer": 3}, "needs the texts"),
        ({"question": "x", "answer": "no idea"}, "ends in no number"),
    ],
)
def test_rows_of_another_format(row: dict[str, object], why: str) -> None:
    good = {"question": "q", "answer": "#### 1"}
    with pytest.raises(ConfigError, match=f"line 2: .*{why}"):
        read_problems("f", enumerate([good, row], 1))


def test_too_few_training_rows() -> None:
    problem = Problem(0, "q", "#### 1")
    with pytest.raises(ConfigError, match="shows 5 rows"):
        make_prompts(PRESETS["vllm"], [problem], tested=[problem], train=[problem])
    with pytest.raises(ConfigError, match="no preset 'lm_eval'"):
        find_preset("lm_eval")


def outcome(text: str, reason: str = "stop", error: str | None = None) -> Outcome:
    problem = Problem(0, "q", "#### 18")
    return judge(Answer(problem, text, reason, error), PRESETS["boxed"]).outcome


def test_outcomes() -> None:
    assert outcome("\\boxed{18}") is Outcome.correct
    assert outcome("\\boxed{18} and on", "length") is Outcome.correct
    assert outcome("\\boxed{17}") is Outcome.wrong
    assert outcome("it is 18") is Outcome.no_answer
    assert outcome("it is 18", "length") is Outcome.truncated
    assert outcome("", error="engine: broke") is Outcome.error


def test_errors_are_not_answers() -> None:
    problems = [Problem(k, "q", "#### 18") for k in range(4)]
    texts = ["\\boxed{18}", "\\boxed{18}", "\\boxed{1}", ""]
    errors = [None, None, None, "engine: broke"]
    verdicts = [
        judge(Answer(p, text, "stop", error), PRESETS["boxed"])
        for p, text, error in zip(problems, texts, errors, strict=True)
    ]
    score = Score(tuple(verdicts), "boxed")
    assert score.accuracy == pytest.approx(2 / 3)
    assert sum(score.outcomes().values()) == 4
    assert score.without(1).accuracy == pytest.approx(1 / 2)
    json.dumps(score.as_json(), allow_nan=False)


def test_texts_are_cut_at_the_stops_before_they_are_read() -> None:
    answer = Answer(Problem(0, "q", "#### 18"), "It is 18\n\nQuestion: 20 apples", "stop")
    assert judge(answer, PRESETS["lm-eval"]).readings["flexible"].text == "18"
    assert judge(answer, PRESETS["question"]).readings["flexible"].text == "20"
