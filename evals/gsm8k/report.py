"""The five files of a GSM8K run."""

from typing import Any

from evals.arm import PLAIN, Arm
from evals.gsm8k.extract import EXTRACTORS
from evals.gsm8k.page import make_page
from evals.gsm8k.prompts import leaked
from evals.gsm8k.result import Result
from evals.gsm8k.score import Verdict
from evals.metrics import latency, request_json
from evals.numbers import rounded
from evals.report import Report

KIND = "eval-gsm8k"


def make_report(result: Result) -> Report:
    """All five files."""
    return Report(
        kind=KIND,
        summary=_summary(result),
        per_request=[
            _row(verdict, result.arms[name])
            for name, score in result.scores.items()
            for verdict in score.verdicts
        ],
        matrix=[_matrix(result, name) for name in result.arms],
        manifest=result.manifest,
        page=make_page(result),
    )


def _summary(result: Result) -> dict[str, Any]:
    preset, paired = result.preset, result.paired
    shown = leaked(preset)
    without = result.score.without(shown) if shown else None
    return {
        "preset": result.label,
        "preset_source": preset.source,
        "model": result.model,
        "draft": result.draft,
        "data": {
            "name": result.problems.name,
            "rows": len(result.problems.rows),
            "rows_asked": result.asked,
            "content_sha256": result.problems.content_hash,
            "known_as": result.problems.known_as,
            "statement": result.problems.statement(),
        },
        "arm": result.arm.name,
        **result.score.as_json(),
        **result.arm.as_json(),
        "without_leaked_rows": None
        if without is None
        else {"rows_left_out": shown, "correct": without.correct, "accuracy": without.accuracy},
        PLAIN: None
        if PLAIN not in result.arms or result.arm.name == PLAIN
        else result.scores[PLAIN].as_json() | result.arms[PLAIN].as_json(),
        "paired": None
        if paired is None
        else {**paired.as_json(), "equal_outputs": result.equal_outputs},
        "gates": result.gates,
        "notes": list(result.notes),
        "example_prompt": {"text": result.example, "tokens": result.example_tokens},
    }


def _row(verdict: Verdict, arm: Arm) -> dict[str, Any]:
    done = arm.done.get(verdict.row_id)
    answer = verdict.answer
    return {
        "index": answer.problem.index,
        "id": verdict.row_id,
        "arm": arm.name,
        "outcome": verdict.outcome.value,
        "gold": answer.problem.answer.rpartition("####")[2].strip(),
        "extracted": {name: verdict.readings[name].text for name in EXTRACTORS},
        "correct": {name: verdict.readings[name].correct for name in EXTRACTORS},
        "ambiguous": verdict.ambiguous,
        "text": answer.text,
        "error": answer.error,
        **({} if done is None else request_json(done)),
    }


def _matrix(result: Result, name: str) -> dict[str, Any]:
    score, arm = result.scores[name], result.arms[name]
    itl, accepted = latency(list(arm.done.values())).itl, arm.acceptance
    return {
        "arm": name,
        "preset": result.label,
        "rows": len(score.verdicts),
        **score.outcomes(),
        "accuracy": rounded(score.accuracy),
        **{f"correct_{key}": found["correct"] for key, found in score.extractors().items()},
        "output_tokens_per_second": rounded(arm.speed),
        "acceptance_length": rounded(accepted.length),
        "acceptance_length_per_request": rounded(accepted.length_per_request),
        "acceptance_rate": rounded(accepted.rate),
        "itl_ms_p50": None if itl is None else rounded(itl.p50 * 1e3),
        "itl_ms_p95": None if itl is None else rounded(itl.p95 * 1e3),
        "itl_ms_p99": None if itl is None else rounded(itl.p99 * 1e3),
    }
