"""`dspark eval gsm8k`: accuracy by a named recipe, with acceptance and speed beside it."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import typer

from dspark_cli.eval_gsm8k_options import Gsm8kOptions
from dspark_cli.eval_run import EvalRun, drafted_arms
from dspark_cli.interrupt import StopNow
from dspark_cli.jsonl import loads
from dspark_cli.parameters import as_parameters
from dspark_cli.reader import open_sources
from dspark_cli.run import FAILED_ROWS, INTERRUPTED
from engine.errors import ConfigError, RequestError
from engine.request import Request, SamplingParams
from evals.arm import RESCORED, Arm
from evals.gates import EXIT_CODE
from evals.gsm8k.data import Problem, Problems, choose, read_problems
from evals.gsm8k.page import lines_for_people
from evals.gsm8k.presets import Preset
from evals.gsm8k.prompts import Prompt, leaked, make_prompts, needs_training_rows
from evals.gsm8k.report import make_report
from evals.gsm8k.result import Result
from evals.gsm8k.score import Answer, Score, judge
from evals.manifest import manifest
from evals.report import check_out, write_report


def gsm8k(**values: Any) -> None:
    """Answer GSM8K problems, score every text with five extractors, and write reports to --out.

    The score is the preset's own; the recipe's name belongs to it. Rows end as correct, wrong,
    no answer, truncated or error; an error is never a wrong answer, and the exit code is 3 if
    there is one. With --compare-plain, drafted and plain answers are compared row by row. A
    failed --gate exits with 4. The same command after a crash or Ctrl-C goes on where it was.
    """
    given = Gsm8kOptions(**values)
    given.check()
    raise typer.Exit(_run(given))


as_parameters(gsm8k, Gsm8kOptions)


def _shots(data: str) -> Any:
    try:
        return load(data).rows
    except ConfigError as error:
        raise ConfigError(
            f"the examples of this preset: {error}", f"give them with --shots-data; {error.hint}"
        ) from None


def _run(given: Gsm8kOptions) -> int:
    preset, label = given.recipe()
    gates = given.gates()
    problems = load(given.data)
    chosen = choose(problems.rows, preset.sample, preset.seed)[: given.limit]
    train = _shots(given.shots_data) if needs_training_rows(preset) else ()
    prompts = make_prompts(preset, chosen, tested=problems.rows, train=train)
    notes = _notes(preset, problems)
    if given.rescore is not None:
        result = _rescore(given, preset, label, problems, prompts, notes)
    else:
        try:
            result = _evaluate(given, preset, label, problems, prompts, notes)
        except StopNow:
            sys.stderr.write(
                f"dspark: interrupted; what ended is kept in {given.out}: run the same command "
                "again to go on\n"
            )
            return INTERRUPTED
    result.gates.extend(gate.check(result.gate_values()) for gate in gates)
    write_report(make_report(result), given.out)
    if not given.quiet:
        for line in [problems.statement(), *lines_for_people(result)]:
            sys.stderr.write(f"dspark: {line}\n")
        sys.stderr.write(f"dspark: wrote {given.out / 'report.html'} and the files beside it\n")
    if any(not gate["passed"] for gate in result.gates):
        return EXIT_CODE
    return FAILED_ROWS if result.score.outcomes()["error"] else 0


def load(source: str) -> Problems:
    """Problems of a file or a data set."""
    return read_problems(source, rows_of(source))


def rows_of(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, fields) of each row; a line that is not JSON is an error of the whole file."""
    for part in open_sources(source):
        for line, data in part.rows():
            try:
                yield line, loads(data or b"")
            except RequestError as error:
                raise ConfigError(f"{part.name}, line {line}: {error}", error.hint) from None


def _notes(preset: Preset, problems: Problems) -> list[str]:
    notes = []
    if leaked(preset):
        notes.append(
            f"the first {leaked(preset)} rows under test are shown in every prompt, answers "
            "included (this preset's way): the score without them is given beside it"
        )
    if problems.known_as == "train":
        notes.append("these are the training rows: a model may have been trained on them")
    return notes


def _evaluate(
    given: Gsm8kOptions,
    preset: Preset,
    label: str,
    problems: Problems,
    prompts: Sequence[Prompt],
    notes: list[str],
) -> Result:
    what = {
        "command": "eval gsm8k",
        "recipe": asdict(preset) | {"rules": asdict(preset.rules)},
        "label": label,
        "sampling": [given.top_p, given.top_k, given.min_p],
        "content": problems.content_hash,
    }
    what = json.loads(json.dumps(what))  # as the journal will have it
    run = EvalRun(given, given.out, given.overwrite, what)
    names = drafted_arms(run.config, given.compare_plain)
    requests = [
        Request(
            request_id=str(prompt.problem.index),
            prompt_token_ids=_encode(run, preset, prompt),
            params=_params(given, preset, position),
        )
        for position, prompt in enumerate(prompts)
    ]
    run.say(f"preset {label} ({preset.source}); {problems.statement()}")
    for note in notes:
        run.say(f"note: {note}")
    arms = run.arms(requests, names)
    order = [prompt.problem for prompt in prompts]
    return Result(
        preset=preset,
        label=label,
        problems=problems,
        asked=len(prompts),
        arms=arms,
        scores={name: _score(arm, order, preset) for name, arm in arms.items()},
        example=_rendered(run, preset, prompts[0]),
        example_tokens=len(requests[0].prompt_token_ids),
        model=given.model,
        draft=run.config.draft,
        manifest=_manifest(given, run.settings, problems, run.settings["engine"]["device"]),
        notes=notes,
    )


def _encode(run: EvalRun, preset: Preset, prompt: Prompt) -> tuple[int, ...]:
    tokenizer = run.tokenizer
    if not preset.chat:
        return tuple(tokenizer.encode(prompt.text))
    try:
        return tuple(tokenizer.encode_chat(prompt.messages, _kwargs(run, preset), run.template))
    except RequestError as error:
        raise ConfigError(
            f"the preset {preset.name} needs a chat template: {error}",
            "give --chat-template, or use a preset without one, as lm-eval",
        ) from None


def _rendered(run: EvalRun, preset: Preset, prompt: Prompt) -> str:
    if not preset.chat:
        return prompt.text
    return run.tokenizer.render_chat(prompt.messages, _kwargs(run, preset), run.template)


def _kwargs(run: EvalRun, preset: Preset) -> dict[str, Any] | None:
    return {**preset.template_kwargs, **run.template_kwargs} or None


def _params(given: Gsm8kOptions, preset: Preset, position: int) -> SamplingParams:
    return SamplingParams(
        temperature=preset.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        seed=preset.seed + (position if preset.seed_by_row else 0),
        max_tokens=preset.max_tokens,
        stop=preset.stop,
    )


def _score(arm: Arm, order: Sequence[Problem], preset: Preset) -> Score:
    answers = []
    for problem in order:
        done = arm.done.get(str(problem.index))
        if done is None:
            why = arm.failed.get(str(problem.index), "engine: no output came back")
            answers.append(Answer(problem, "", error=why))
        else:
            answers.append(Answer(problem, done.text, done.finish_reason.value))
    return Score(tuple(judge(answer, preset) for answer in answers), preset.headline)


def _rescore(
    given: Gsm8kOptions,
    preset: Preset,
    label: str,
    problems: Problems,
    prompts: Sequence[Prompt],
    notes: list[str],
) -> Result:
    check_out(given.out, overwrite=given.overwrite)
    answers = _read_answers(str(given.rescore), {p.problem.index: p.problem for p in prompts})
    missing = len(prompts) - len(answers)
    if missing:
        notes.append(
            f"{missing} of {len(prompts)} rows have no text in {given.rescore}: not scored"
        )
    verdicts = tuple(judge(answer, preset) for answer in answers)
    return Result(
        preset=preset,
        label=label,
        problems=problems,
        asked=len(prompts),
        arms={RESCORED: Arm(name=RESCORED)},
        scores={RESCORED: Score(verdicts, preset.headline)},
        example=prompts[0].text,
        example_tokens=None,
        model=None,
        draft=None,
        manifest=_manifest(given, {"recipe": asdict(preset)}, problems, None),
        notes=notes,
    )


def _read_answers(name: str, problems: dict[int, Problem]) -> list[Answer]:
    """Answers by row under test; of a report of several arms those of its first one."""
    found: dict[int, Answer] = {}
    arm: Any = None
    for line, row in rows_of(name):
        arm = arm or row.get("arm")
        if row.get("arm") not in (None, arm):
            continue
        index, text, error = row.get("index"), row.get("text"), row.get("error")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise ConfigError(f"{name}, line {line}: no index", "give the row's index, from 0")
        if index in found:
            raise ConfigError(f"{name}, line {line}: index {index} comes twice", "keep one")
        if index not in problems:
            continue
        if not isinstance(text, str) and not error:
            raise ConfigError(f"{name}, line {line}: no text", 'write {"index": 0, "text": "..."}')
        reason = row.get("finish_reason")
        found[index] = Answer(
            problems[index],
            text if isinstance(text, str) else "",
            reason if isinstance(reason, str) else None,
            None if not error else json.dumps(error),
        )
    if not found:
        raise ConfigError(f"{name} has no text for any row under test", "check --data and index")
    return [found[index] for index in problems if index in found]


def _manifest(
    given: Gsm8kOptions, settings: dict[str, Any], problems: Problems, device: str | None
) -> dict[str, Any]:
    inputs = {
        "data": {
            "name": problems.name,
            "rows": len(problems.rows),
            "content_sha256": problems.content_hash,
        }
    }
    if given.rescore is not None:
        inputs["texts"] = {"name": str(given.rescore)}
    return manifest(settings=settings, inputs=inputs, device=device)
