"""The reports of a SPEED-Bench run."""

from collections.abc import Mapping
from typing import Any

from evals.latency import itl_samples
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
)
from evals.speed_bench.summary import (
    COLUMNS,
    DEFINITIONS,
    Group,
    Result,
    cells,
    matrix,
    per_request,
    summary,
)


def report(result: Result, manifest: Mapping[str, Any]) -> Report:
    """All files of `--out`."""
    body = summary(result)
    return Report(
        kind="eval-speed-bench",
        summary=body,
        per_request=per_request(result),
        matrix=matrix(body),
        manifest=manifest,
        page=_page(result, body),
    )


def _page(result: Result, body: Mapping[str, Any]) -> Page:
    settings = result.settings
    draft = f" with {settings['draft']}" if settings.get("draft") else ", no drafter"
    everything = Group("all", result.turns)
    sections = [
        _part("By category", "by_category", body, notes=[Text(n, True) for n in result.notes])
    ]
    if body["by_tier"]:
        sections.append(_part("By entropy tier", "by_tier", body))
    sections.append(_part("By turn", "by_turn", body))
    if (found := acceptance_section(everything.acceptance)) is not None:
        sections.append(found)
    samples = [s for done in everything.done for s in itl_samples(done)]
    chart = histogram(
        "ITL", {"": [(value * 1e3, times) for value, times in samples]}, x_label="ms a token"
    )
    spent = [[name, f"{seconds:.2f}"] for name, seconds in body["windows"].items()]
    sections.append(Section("Time", [Charts([chart]), Table(("window", "seconds"), spent)]))
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in settings.items()]
    sections.append(Section("Settings", [Code("\n".join(lines))]))
    return Page(
        title=f"SPEED-Bench: {result.data.subset}",
        lead=f"{settings['model']}{draft} on {settings['device']}, {settings['dtype']}; "
        f"{result.name}, the model's own replies fed back; {result.max_num_seqs} at once.",
        facts=_facts(body),
        sections=sections,
    )


def _facts(body: Mapping[str, Any]) -> list[Fact]:
    group, where = body["all"], f"{body['subset']}, {body['turns_played']} turns"
    facts = []
    if (found := group["acceptance"]) is not None:
        facts.append(Fact("acceptance length", f"{found['acceptance_length']:.2f}", where))
        per = f"{found['acceptance_length_per_request']:.2f}"
        facts.append(Fact("mean of turns", per, where))
    facts.append(Fact("tokens/s", f"{body['tokens_per_second'] or 0:.1f}", "whole run"))
    reuse = body["prefix_reuse"]
    if reuse["later_turns"]:
        share = f"{100 * (reuse['share'] or 0):.0f} %"
        facts.append(Fact("prompt reused in later turns", share, "tokens found in the KV cache"))
    facts.append(Fact("turns", str(group["turns"]), f"{group['conversations']} conversations"))
    return facts


def _part(
    title: str, part: str, body: Mapping[str, Any], notes: list[Text] | None = None
) -> Section:
    groups = body[part]
    blocks: list[Any] = list(notes or ())
    lengths = [(group["acceptance"] or {}).get("acceptance_length") for group in groups.values()]
    if any(length is not None for length in lengths):
        means = [
            (group["acceptance"] or {}).get("acceptance_length_per_request")
            for group in groups.values()
        ]
        blocks.append(
            Charts(
                [
                    bars(
                        "Acceptance length",
                        [name.replace("_", " ") for name in groups],
                        {"pooled": lengths, "mean of turns": means},
                        y_label="tokens a round",
                    )
                ]
            )
        )
    rows = [cells(name, group) for name, group in groups.items()]
    rows.append(cells("all", body["all"]))
    caption = f"{body['subset']}, {body['turns_played']} turns"
    blocks.append(Table(COLUMNS, rows, caption=caption))
    if part == "by_category":
        blocks.append(Text(DEFINITIONS))
    return Section(title, blocks)
