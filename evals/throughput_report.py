"""What a throughput run says: `summary.json`, the Markdown table, the rows and the page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.request import Completion
from evals.latency import itl_samples, latency
from evals.markdown import markdown
from evals.metrics import acceptance, request_json
from evals.numbers import ratio, rounded
from evals.report import (
    Charts,
    Code,
    Fact,
    Page,
    Report,
    Section,
    Table,
    Text,
    acceptance_section,
    bars,
    histogram,
    lines,
)
from evals.throughput import PHASES, Crossover, Pass, Point, speed_of, steady_speed_of

DEFINITIONS = (
    "tokens/s counts all output tokens of all requests over the wall time of whole passes; steady: "
    "only while at least 90 % of the batch was in flight. Speed-up: tokens/s drafted over plain, "
    "geometric mean over pairs of passes run one after the other in alternating order (least to "
    "most). TTFT runs from admission to the first token, so it holds no queueing. ITL is the gap "
    "between steps divided by the tokens the step brought. Acceptance length is committed tokens "
    "per round, bonus token included: pooled over rounds, and as the mean of the requests' own. "
    "The second table is about drafted passes (plain ones without a drafter); its last column "
    "splits their wall time."
)

SPEED = (
    "at once",
    "requests",
    "drafted tok/s",
    "drafted steady",
    "plain tok/s",
    "plain steady",
    "speed-up",
)
DETAIL = (
    "at once",
    "tok/s a request",
    "ITL ms p50/p95/p99",
    "TTFT ms p50/p99",
    "accepted pooled/mean",
    "drafts verified",
    "draft/verify/prefill/host/rest %",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run."""

    points: tuple[Point, ...]
    crossover: Crossover
    settings: Mapping[str, Any]
    """What decides the numbers; two runs are comparable if these are equal."""

    windows: Mapping[str, float]
    """Seconds of the run's wall time by what they were spent on; load apart from decoding."""

    warnings: tuple[str, ...] = ()


def mode_json(passes: Sequence[Pass]) -> dict[str, Any]:
    """One mode at one point: all its passes together, then each."""
    done = [completion for p in passes for completion in p.done]
    found = acceptance(done)
    return {
        "tokens_per_second": rounded(speed_of(passes)),
        "tokens_per_second_steady": rounded(steady_speed_of(passes)),
        **latency(done).as_json(),
        "acceptance": found.as_json(),
        "verify_budget_mean": rounded(ratio(found.drafted, found.rounds)),
        "in_flight_mean": rounded(sum(p.mean_in_flight for p in passes) / len(passes)),
        "seconds_by_phase": {
            name: rounded(sum(p.seconds[name] for p in passes)) for name in (*PHASES, "outside")
        },
        "passes": [_pass_json(p) for p in passes],
    }


def _pass_json(made: Pass) -> dict[str, Any]:
    return {
        "seconds": rounded(made.end - made.start),
        "output_tokens": made.output_tokens,
        "tokens_per_second": rounded(made.speed),
        "windows": {window.name: rounded(window.seconds) for window in made.windows},
        "seconds_by_phase": {name: rounded(spent) for name, spent in made.seconds.items()},
    }


def point_json(point: Point) -> dict[str, Any]:
    """One batch size."""
    spread = point.speedup
    return {
        "max_num_seqs": point.max_num_seqs,
        "requests": point.requests,
        "speedup": None
        if spread is None
        else {
            "mean": rounded(spread.mean),
            "least": rounded(spread.least),
            "most": rounded(spread.most),
            "pairs": [rounded(value) for value in spread.values],
        },
        "equal_outputs": [pair.equal_outputs for pair in point.pairs],
        "drafted": mode_json(point.drafted) if point.drafted else None,
        "plain": mode_json(point.plain),
    }


def summary(result: Result) -> dict[str, Any]:
    """The content of `summary.json`, without the schema's fields."""
    return {
        "settings": dict(result.settings),
        "definitions": DEFINITIONS,
        "crossover": asdict(result.crossover),
        "warnings": list(result.warnings),
        "windows": {name: rounded(spent) for name, spent in result.windows.items()},
        "points": [point_json(point) for point in result.points],
    }


def tables(body: Mapping[str, Any]) -> str:
    """The Markdown tables of a summary: speed, then what is behind it."""
    speed = markdown(SPEED, [_speed_cells(point) for point in body["points"]])
    return f"{speed}\n{markdown(DETAIL, [_detail_cells(point) for point in body['points']])}"


def _speed_cells(point: Mapping[str, Any]) -> list[str]:
    drafted, plain, spread = point["drafted"] or {}, point["plain"], point["speedup"]
    gain = ""
    if spread is not None:
        gain = f"{spread['mean']:.2f} x ({spread['least']:.2f} to {spread['most']:.2f})"
    return [
        str(point["max_num_seqs"]),
        str(point["requests"]),
        _one(drafted.get("tokens_per_second")),
        _one(drafted.get("tokens_per_second_steady")),
        _one(plain["tokens_per_second"]),
        _one(plain["tokens_per_second_steady"]),
        gain,
    ]


def _detail_cells(point: Mapping[str, Any]) -> list[str]:
    shown = point["drafted"] or point["plain"]
    found = shown["acceptance"]
    length = ""
    if found is not None:
        length = f"{found['acceptance_length']:.2f} / {found['acceptance_length_per_request']:.2f}"
    return [
        str(point["max_num_seqs"]),
        _one((shown["tokens_per_second_per_request"] or {}).get("p50")),
        _several(shown["itl_ms"], "p50", "p95", "p99"),
        _several(shown["ttft_ms"], "p50", "p99"),
        length,
        _one(shown["verify_budget_mean"]),
        _shares(shown["seconds_by_phase"]),
    ]


def _one(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _several(found: Mapping[str, float] | None, *names: str) -> str:
    return "" if found is None else " / ".join(f"{found[name]:.1f}" for name in names)


def _shares(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    return " / ".join(f"{100 * max(spent, 0.0) / total:.0f}" for spent in seconds.values())


def matrix(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `matrix.csv`: a batch size and a mode each."""
    rows = []
    for point in body["points"]:
        for mode in ("drafted", "plain"):
            if (made := point[mode]) is None:
                continue
            found = made["acceptance"] or {}
            rows.append(
                {
                    "max_num_seqs": point["max_num_seqs"],
                    "mode": mode,
                    "requests": point["requests"],
                    "tokens_per_second": made["tokens_per_second"],
                    "tokens_per_second_steady": made["tokens_per_second_steady"],
                    **_flat("itl_ms", made["itl_ms"]),
                    **_flat("ttft_ms", made["ttft_ms"]),
                    "acceptance_length": found.get("acceptance_length"),
                    "acceptance_length_per_request": found.get("acceptance_length_per_request"),
                    "verify_budget_mean": made["verify_budget_mean"],
                    "speedup": (point["speedup"] or {}).get("mean") if mode == "drafted" else None,
                }
            )
    return rows


def _flat(name: str, found: Mapping[str, float] | None) -> dict[str, float]:
    return {f"{name}_{p}": found[p] for p in ("p50", "p95", "p99")} if found else {}


def per_request(result: Result) -> list[dict[str, Any]]:
    """Rows of `per_request.jsonl`: every request of every pass, its text left out."""
    rows: list[dict[str, Any]] = []
    for point in result.points:
        for mode, passes in (("drafted", point.drafted), ("plain", point.plain)):
            for number, made in enumerate(passes):
                rows += [
                    _request_row(len(rows) + at, done, point, mode, number)
                    for at, done in enumerate(made.done)
                ]
    return rows


def _request_row(
    index: int, done: Completion, point: Point, mode: str, number: int
) -> dict[str, Any]:
    return {
        "index": index,
        "id": done.request.request_id,
        "max_num_seqs": point.max_num_seqs,
        "mode": mode,
        "pass": number,
        **request_json(done),
    }


def report(result: Result, manifest: Mapping[str, Any]) -> Report:
    """All files of `--out`."""
    body = summary(result)
    return Report(
        kind="bench-throughput",
        summary=body,
        per_request=per_request(result),
        matrix=matrix(body),
        manifest=manifest,
        page=_page(result, body),
    )


def _page(result: Result, body: Mapping[str, Any]) -> Page:
    settings = result.settings
    draft = f" with {settings['draft']}" if settings.get("draft") else ", no drafter"
    sections = [
        Section(
            "Throughput",
            [
                *[Text(warning, warning=True) for warning in result.warnings],
                Text(result.crossover.verdict[:1].upper() + result.crossover.verdict[1:] + "."),
                Charts(_figures(body)),
                Table(SPEED, [_speed_cells(point) for point in body["points"]]),
                Table(DETAIL, [_detail_cells(point) for point in body["points"]]),
                Text(DEFINITIONS),
            ],
        )
    ]
    done = [d for point in result.points for p in point.drafted for d in p.done]
    if (found := acceptance_section(acceptance(done))) is not None:
        sections.append(found)
    sections += [_time_section(result, body), _settings_section(settings)]
    return Page(
        title="Throughput",
        lead=f"{settings['model']}{draft} on {settings['device']}, {settings['dtype']}; "
        f"{settings['data']}; {_ending(settings)}.",
        facts=_facts(body),
        sections=sections,
    )


def _ending(settings: Mapping[str, Any]) -> str:
    if settings.get("ignore_eos"):
        return f"every output forced to {settings['max_tokens']} tokens (--ignore-eos)"
    return f"outputs end where the model ends them, at most {settings['max_tokens']} tokens"


def _facts(body: Mapping[str, Any]) -> list[Fact]:
    first, last = body["points"][0], body["points"][-1]
    facts = []
    for point in (first, last) if last is not first else (first,):
        where = f"{point['max_num_seqs']} at once"
        made = point["drafted"] or point["plain"]
        facts.append(Fact(f"tokens/s, {where}", _one(made["tokens_per_second"])))
        if (spread := point["speedup"]) is not None:
            between = f"{spread['least']:.2f} to {spread['most']:.2f} over pairs"
            facts.append(Fact(f"speed-up, {where}", f"{spread['mean']:.2f} x", between))
    if (crossing := body["crossover"]["batch"]) is not None:
        facts.append(Fact("drafting pays below", f"{crossing:.1f}", "requests at once"))
    return facts


def _figures(body: Mapping[str, Any]) -> list[str]:
    points = body["points"]

    def series(mode: str, name: str) -> list[tuple[float, float | None]]:
        return [(p["max_num_seqs"], (p[mode] or {}).get(name)) for p in points]

    modes = [m for m in ("drafted", "plain") if points[0][m] is not None]
    figures = [
        lines(
            "Output tokens/s",
            {mode: series(mode, "tokens_per_second") for mode in modes},
            x_label="requests at once",
            y_label="tokens/s",
            log_x=True,
        )
    ]
    if points[0]["speedup"] is None:
        return figures
    gains = [(p["max_num_seqs"], p["speedup"]["mean"]) for p in points]
    even = [(p["max_num_seqs"], 1.0) for p in points]
    budget = series("drafted", "verify_budget_mean")
    length = [(p["max_num_seqs"], p["drafted"]["acceptance"]["acceptance_length"]) for p in points]
    return [
        *figures,
        lines(
            "Speed-up",
            {"drafted over plain": gains, "break-even": even},
            x_label="requests at once",
            y_label="x",
            log_x=True,
        ),
        lines(
            "Verify budget against load",
            {"drafts verified a round": budget, "tokens committed a round": length},
            x_label="requests at once",
            y_label="tokens a request and round",
            log_x=True,
        ),
    ]


def _time_section(result: Result, body: Mapping[str, Any]) -> Section:
    points = body["points"]
    labels = [str(p["max_num_seqs"]) for p in points]
    shown = "drafted" if points[0]["drafted"] is not None else "plain"
    phases: dict[str, list[float | None]] = {}
    for name in (*PHASES, "outside"):
        phases[name] = [
            100 * p[shown]["seconds_by_phase"][name] / sum(p[shown]["seconds_by_phase"].values())
            for p in points
        ]
    figures = [
        bars(
            f"Where {shown} time goes",
            labels,
            phases,
            x_label="requests at once",
            y_label="% of wall time",
            values=False,
        )
    ]
    widest = result.points[-1]
    figures.append(
        histogram(
            f"ITL, {widest.max_num_seqs} at once",
            {"drafted": _itl_ms(widest.drafted), "plain": _itl_ms(widest.plain)},
            x_label="ms a token",
        )
    )
    rows = [[name, f"{spent:.2f}"] for name, spent in body["windows"].items()]
    rows.append(["all", f"{sum(body['windows'].values()):.2f}"])
    return Section("Time", [Charts(figures), Table(("window of the run", "seconds"), rows)])


def _itl_ms(passes: Sequence[Pass]) -> list[tuple[float, int]]:
    samples = [sample for p in passes for done in p.done for sample in itl_samples(done)]
    return [(value * 1e3, times) for value, times in samples]


def _settings_section(settings: Mapping[str, Any]) -> Section:
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in settings.items()]
    return Section("Settings", [Code("\n".join(lines))])
