"""A GSM8K run for people: the lines that the command prints, and the page."""

from evals.arm import PLAIN, Arm
from evals.charts import histogram
from evals.gsm8k.prompts import leaked
from evals.gsm8k.result import Result
from evals.gsm8k.score import Outcome, Score
from evals.metrics import itl_samples, latency
from evals.page import Block, Charts, Code, Fact, Page, Section, Table, Text
from evals.report import acceptance_section
from evals.stats import Paired, wilson


def lines_for_people(result: Result) -> list[str]:
    """What the command prints at the end."""
    score, arm, paired = result.score, result.arm, result.paired
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in _counted(score))
    lines = [
        f"preset {result.label}, {score.headline} extractor: {_accuracy(score)}",
        f"of {len(score.verdicts)} rows: {counts}",
    ]
    for name, found in score.extractors().items():
        lines.append(f"  {name:15} {found['correct']:5} correct, {_percent(found['accuracy'])}")
    shown = leaked(result.preset)
    if shown:
        lines.append(f"without the {shown} rows shown: {_accuracy(score.without(shown))}")
    if arm.done:
        lines.append(", ".join(_speeds(arm)))
    if paired is not None:
        plain = result.arms[PLAIN]
        lines += [
            f"plain: {_accuracy(result.scores[PLAIN])}",
            "plain: " + ", ".join(_speeds(plain)),
        ]
        lines.append(_paired_line(result, paired))
    lines += [
        f"gate {gate['gate']}: {'passed' if gate['passed'] else 'FAILED'} ({gate['value']})"
        for gate in result.gates
    ]
    return lines


def _counted(score: Score) -> list[tuple[str, int]]:
    order = (Outcome.correct, Outcome.wrong, Outcome.no_answer, Outcome.truncated, Outcome.error)
    outcomes = score.outcomes()
    return [(outcome.value, outcomes[outcome.value]) for outcome in order]


def _accuracy(score: Score) -> str:
    low, high = score.interval or (0.0, 0.0)
    return (
        f"accuracy {_percent(score.accuracy)} ({score.correct}/{len(score.answered)}, 95 % "
        f"interval {_percent(low)} to {_percent(high)})"
    )


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.2f} %"


def _speeds(arm: Arm) -> list[str]:
    times, accepted = latency(list(arm.done.values())), arm.acceptance
    parts = [] if arm.speed is None else [f"{arm.speed:.1f} output tokens/s"]
    if accepted.length is not None and accepted.length_per_request is not None:
        parts.append(
            f"acceptance length {accepted.length:.3f} pooled, "
            f"{accepted.length_per_request:.3f} per request"
        )
    if times.itl is not None:
        parts.append(f"ITL p50 {times.itl.p50 * 1e3:.2f} ms")
    return parts or ["not timed: all rows were kept from an earlier run"]


def _paired_line(result: Result, paired: Paired) -> str:
    flipped = [*paired.only_drafted, *paired.only_plain]
    ids = f", ids {', '.join(flipped[:20])}{' ...' if len(flipped) > 20 else ''}" if flipped else ""
    return (
        f"paired over {paired.rows} rows: {len(paired.only_drafted)} right only drafted, "
        f"{len(paired.only_plain)} only plain, exact McNemar p {paired.p_value:.3g}; "
        f"{result.equal_outputs} outputs equal token for token{ids}"
    )


def make_page(result: Result) -> Page:
    """What `report.html` shows."""
    sections = [
        _outcomes(result),
        _paired_section(result),
        acceptance_section(result.arm.acceptance),
        _times(result),
        _gates(result),
        Section("Example prompt", [Code(result.example, _example_line(result))]),
        _run_section(result),
    ]
    model = f"{result.model} with {result.draft}" if result.draft else result.model
    return Page(
        title=f"GSM8K, preset {result.label}",
        lead=f"{model or 'texts made elsewhere'}; {result.asked} rows of {result.problems.name}",
        facts=_facts(result),
        sections=[section for section in sections if section is not None],
    )


def _facts(result: Result) -> list[Fact]:
    score, arm = result.score, result.arm
    interval = _interval(score.interval).replace(" ", "\u00a0")
    facts = [
        Fact(
            f"accuracy, {arm.name}",
            _percent(score.accuracy),
            f"{score.correct}/{len(score.answered)}; {interval}",
        )
    ]
    if result.paired is not None:
        plain = result.scores[PLAIN]
        note = f"{result.paired.flips} flips, p {result.paired.p_value:.3g}"
        facts.append(Fact("accuracy, plain", _percent(plain.accuracy), note))
    accepted, itl = arm.acceptance, latency(list(arm.done.values())).itl
    if accepted.length is not None:
        note = f"per request {accepted.length_per_request or 0:.2f}"
        facts.append(Fact("acceptance length", f"{accepted.length:.2f}", note))
    if arm.speed is not None:
        plain_speed = result.arms[PLAIN].speed if result.paired is not None else None
        note = f"plain {plain_speed:,.0f}" if plain_speed else ""
        facts.append(Fact("output tokens/s", f"{arm.speed:,.0f}", note))
    if itl is not None:
        note = f"p95 {itl.p95 * 1e3:.1f}, p99 {itl.p99 * 1e3:.1f}"
        facts.append(Fact("ITL p50, ms", f"{itl.p50 * 1e3:.1f}", note))
    return facts


def _outcomes(result: Result) -> Section:
    names = list(result.scores)
    rows = [
        [label.replace("_", " "), *(str(result.scores[n].outcomes()[label]) for n in names)]
        for label, _ in _counted(result.score)
    ]
    extractors = [
        [
            name + (" (headline)" if name == result.score.headline else ""),
            str(found["correct"]),
            _percent(found["accuracy"]),
            _interval(wilson(found["correct"], len(result.score.answered))),
            str(found["found_an_answer"]),
            str(found["differs_from_headline"]),
        ]
        for name, found in result.score.extractors().items()
    ]
    columns = ("extractor", "correct", "accuracy", "95 % interval", "found one", "other verdict")
    blocks: list[Block] = [Text(note, warning=True) for note in result.notes]
    blocks += [
        Text(result.problems.statement(), warning=result.problems.known_as != "test"),
        Table(["outcome", *names], rows),
        Table(columns, extractors, "Every text read by every extractor"),
    ]
    return Section("Answers", blocks)


def _interval(found: tuple[float, float] | None) -> str:
    return "" if found is None else f"{100 * found[0]:.1f} to {100 * found[1]:.1f} %"


def _paired_section(result: Result) -> Section | None:
    paired = result.paired
    if paired is None:
        return None
    table = Table(
        ["", "plain right", "plain not right"],
        [
            ["drafted right", str(paired.both), str(len(paired.only_drafted))],
            ["drafted not right", str(len(paired.only_plain)), str(paired.neither)],
        ],
    )
    text = (
        "The same rows without the drafter. Only rows that one side got right and the other did "
        "not say anything: their exact McNemar p is the chance of a split at least this uneven "
        "if drafting changed nothing. Below about 15 net flips in 1319 rows is noise."
    )
    line = _paired_line(result, paired)
    return Section(
        "Drafted against plain", [Text(text), table, Text(line[0].upper() + line[1:] + ".")]
    )


def _times(result: Result) -> Section | None:
    series = {
        name: [(1e3 * s, n) for done in arm.done.values() for s, n in itl_samples(done)]
        for name, arm in result.arms.items()
    }
    if not any(series.values()):
        return None
    rows = []
    for name, arm in result.arms.items():
        times = latency(list(arm.done.values()))
        for label, found in (("ITL", times.itl), ("TTFT", times.ttft)):
            if found is not None:
                cells = (found.mean, found.p50, found.p95, found.p99)
                rows.append([f"{label}, {name}", *(f"{1e3 * x:.2f}" for x in cells)])
    text = (
        "ITL: the gap between steps shared by the tokens it brought, a sample a token. TTFT: from "
        "admission to the first token, without waiting in the queue."
    )
    return Section(
        "Times",
        [
            Text(text),
            Charts([histogram("ITL", series, x_label="ms a token")]),
            Table(["ms", "mean", "p50", "p95", "p99"], rows),
        ],
    )


def _gates(result: Result) -> Section | None:
    if not result.gates:
        return None
    rows = [
        [gate["gate"], str(gate["value"]), "passed" if gate["passed"] else "FAILED"]
        for gate in result.gates
    ]
    return Section("Gates", [Table(["bar", "measured", ""], rows)])


def _example_line(result: Result) -> str:
    count = "" if result.example_tokens is None else f", {result.example_tokens} tokens"
    return f"Row {result.score.verdicts[0].row_id} as the model gets it{count}"


def _run_section(result: Result) -> Section:
    preset = result.preset
    recipe = [
        ["wording from", preset.source],
        ["shots", f"{preset.num_shots} ({preset.shots})"],
        ["stop strings", ", ".join(map(repr, preset.stop)) or "none, the end token only"],
        ["max tokens", str(preset.max_tokens)],
        ["temperature", str(preset.temperature)],
        ["seed", f"{preset.seed}{' + position' if preset.seed_by_row else ''}"],
        ["content sha256", result.problems.content_hash],
    ]
    notes: list[Block] = (
        [Text(preset.note[0].upper() + preset.note[1:] + ".")] if preset.note else []
    )
    if result.model is None:
        notes = [Text("No model ran: of the recipe, only stop strings and extractors were used.")]
    command = str(result.manifest.get("command", ""))
    return Section("How it ran", [*notes, Table(["recipe", ""], recipe, words=True), Code(command)])
