"""What a SPEED-Bench run says, per category and per entropy tier."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import Completion, FinishReason, RequestFailure
from evals.latency import Latency, Window, latency, speed, steady_window
from evals.markdown import markdown
from evals.metrics import Acceptance, acceptance, request_json
from evals.numbers import ratio, rounded
from evals.speed_bench.layouts import TIERS, SpeedBench
from evals.speed_bench.play import Turn

DEFINITIONS = (
    "Acceptance length is committed tokens per round, bonus token included, counted after the cut "
    "at the end of an output: pooled over rounds, as the mean over turns, and as the mean over "
    "conversations. Kept: accepted of all drafts. Reused: prompt tokens of later turns whose KV "
    "was found in the prefix cache. Cut: turns that ended at the token limit; their acceptance is "
    "that of a part of the answer."
)

COLUMNS = (
    "",
    "turns",
    "out tokens",
    "accepted pooled",
    "mean of turns",
    "mean of conv.",
    "kept %",
    "cut %",
    "errors",
    "tok/s a turn",
    "ITL ms p50/p95/p99",
)


@dataclass(frozen=True, slots=True)
class Group:
    """Some turns, measured together."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def done(self) -> list[Completion]:
        """The replies."""
        return [turn.result for turn in self.turns if isinstance(turn.result, Completion)]

    @property
    def failed(self) -> list[RequestFailure]:
        """Turns that could not be finished."""
        return [turn.result for turn in self.turns if isinstance(turn.result, RequestFailure)]

    @property
    def acceptance(self) -> Acceptance:
        """Over the replies."""
        return acceptance(self.done)

    @property
    def latency(self) -> Latency:
        """Over the replies."""
        return latency(self.done)

    @property
    def length_per_conversation(self) -> float | None:
        """Mean over conversations of committed / rounds, all turns of one together."""
        by_id: dict[str, list[int]] = {}
        for turn in self.turns:
            if turn.completion is not None and turn.completion.rounds:
                sums = by_id.setdefault(turn.conversation.id, [0, 0])
                sums[0] += sum(r.committed for r in turn.completion.rounds)
                sums[1] += len(turn.completion.rounds)
        lengths = [committed / rounds for committed, rounds in by_id.values()]
        return ratio(sum(lengths), len(lengths))

    @property
    def cut(self) -> int:
        """Replies that ended at a limit."""
        return sum(done.finish_reason is FinishReason.LENGTH for done in self.done)

    def as_json(self) -> dict[str, Any]:
        """For `summary.json`."""
        done = self.done
        return {
            "conversations": len({turn.conversation.id for turn in self.turns}),
            "turns": len(self.turns),
            "output_tokens": sum(len(d.token_ids) for d in done),
            "prompt_tokens": sum(len(d.request.prompt_token_ids) for d in done),
            "acceptance": self.acceptance.as_json(),
            "acceptance_length_per_conversation": rounded(self.length_per_conversation),
            **self.latency.as_json(),
            "cut": self.cut,
            "cut_share": rounded(ratio(self.cut, len(done))),
            "errors": dict(Counter(failure.kind for failure in self.failed)),
        }


def _grouped(turns: Sequence[Turn], key: Callable[[Turn], str | None]) -> list[Group]:
    by_name: dict[str, list[Turn]] = {}
    for turn in turns:
        if (name := key(turn)) is not None:
            by_name.setdefault(name, []).append(turn)
    return [Group(name, tuple(found)) for name, found in by_name.items()]


def by_category(turns: Sequence[Turn]) -> list[Group]:
    """Groups by category, in alphabetical order."""
    return sorted(_grouped(turns, lambda t: t.conversation.category), key=lambda g: g.name)


def by_tier(turns: Sequence[Turn]) -> list[Group]:
    """Groups by entropy tier, least entropy first; none in the qualitative config."""
    found = _grouped(turns, lambda t: t.conversation.tier)
    return sorted(found, key=lambda g: TIERS.index(g.name))


def by_sub_category(turns: Sequence[Turn]) -> list[Group]:
    """Groups by category and sub-category."""
    found = _grouped(turns, lambda t: f"{t.conversation.category}/{t.conversation.sub_category}")
    return sorted(found, key=lambda g: g.name)


def by_turn(turns: Sequence[Turn]) -> list[Group]:
    """Groups by place in the conversation, `turn 1` first."""
    return _grouped(sorted(turns, key=lambda t: t.turn), lambda t: f"turn {t.turn + 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run."""

    data: SpeedBench
    turns: tuple[Turn, ...]
    first_turn_only: bool
    max_num_seqs: int
    run: Window
    """Around the decoding."""

    settings: Mapping[str, Any]
    windows: Mapping[str, float]
    """Seconds of the run's wall time by what they were spent on."""

    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Subset and turns: what every number belongs to."""
        return f"{self.data.subset}, {'first turns' if self.first_turn_only else 'all turns'}"


def prefix_reuse(turns: Iterable[Turn]) -> dict[str, Any]:
    """How much of the prompts of later turns was in the KV cache."""
    later = [t.completion for t in turns if t.turn > 0 and t.completion is not None]
    prompt = sum(len(done.request.prompt_token_ids) for done in later)
    cached = sum(done.num_cached_tokens for done in later)
    return {
        "later_turns": len(later),
        "prompt_tokens": prompt,
        "cached_prompt_tokens": cached,
        "share": rounded(ratio(cached, prompt)),
    }


def summary(result: Result) -> dict[str, Any]:
    """The content of `summary.json`, without the schema's fields."""
    everything = Group("all", result.turns)
    done = everything.done
    steady = steady_window(done, result.max_num_seqs)
    turns = result.turns
    return {
        "subset": result.data.subset,
        "config": result.data.config,
        "layout": result.data.layout,
        "turns_played": "first" if result.first_turn_only else "all",
        "rows": len(result.data.conversations),
        "data_sha256": result.data.sha256,
        "settings": dict(result.settings),
        "definitions": DEFINITIONS,
        "notes": list(result.notes),
        "all": everything.as_json(),
        "tokens_per_second": rounded(speed(done, result.run)),
        "tokens_per_second_steady": None if steady is None else rounded(speed(done, steady)),
        "prefix_reuse": prefix_reuse(turns),
        "windows": {name: rounded(spent) for name, spent in result.windows.items()},
        "by_category": {group.name: group.as_json() for group in by_category(turns)},
        "by_tier": {group.name: group.as_json() for group in by_tier(turns)},
        "by_sub_category": {group.name: group.as_json() for group in by_sub_category(turns)},
        "by_turn": {group.name: group.as_json() for group in by_turn(turns)},
    }


def cells(name: str, group: Mapping[str, Any]) -> list[str]:
    """A row of a table, from a group's JSON."""
    found, itl = group["acceptance"] or {}, group["itl_ms"]
    speeds = group["tokens_per_second_per_request"]
    share = found.get("acceptance_rate")
    return [
        name,
        str(group["turns"]),
        str(group["output_tokens"]),
        _number(found.get("acceptance_length")),
        _number(found.get("acceptance_length_per_request")),
        _number(group["acceptance_length_per_conversation"]),
        "" if share is None else f"{100 * share:.0f}",
        "" if group["cut_share"] is None else f"{100 * group['cut_share']:.0f}",
        str(sum(group["errors"].values())),
        "" if speeds is None else f"{speeds['p50']:.1f}",
        "" if itl is None else f"{itl['p50']:.1f} / {itl['p95']:.1f} / {itl['p99']:.1f}",
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def table(body: Mapping[str, Any], part: str) -> str:
    """The Markdown table of one part of a summary: `by_category`, `by_tier`, `by_turn`."""
    name = f"{body['subset']} ({body['turns_played']} turns)"
    rows = [cells(key, group) for key, group in body[part].items()]
    rows.append(cells("all", body["all"]))
    return markdown((name, *COLUMNS[1:]), rows)


def matrix(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `matrix.csv`; every one carries the subset's name."""
    rows = []
    parts = ("by_category", "by_tier", "by_sub_category", "by_turn")
    groups = [(part[3:], key, body[part][key]) for part in parts for key in body[part]]
    for kind, key, group in (("all", "all", body["all"]), *groups):
        found, itl = group["acceptance"] or {}, group["itl_ms"] or {}
        speeds = group["tokens_per_second_per_request"] or {}
        rows.append(
            {
                "subset": body["subset"],
                "turns_played": body["turns_played"],
                "group": kind,
                "name": key,
                "conversations": group["conversations"],
                "turns": group["turns"],
                "output_tokens": group["output_tokens"],
                "acceptance_length": found.get("acceptance_length"),
                "acceptance_length_per_request": found.get("acceptance_length_per_request"),
                "acceptance_length_per_conversation": group["acceptance_length_per_conversation"],
                "acceptance_rate": found.get("acceptance_rate"),
                "itl_ms_p50": itl.get("p50"),
                "itl_ms_p95": itl.get("p95"),
                "itl_ms_p99": itl.get("p99"),
                "tokens_per_second_per_request_p50": speeds.get("p50"),
                "cut_share": group["cut_share"],
                "errors": sum(group["errors"].values()),
            }
        )
    return rows


def per_request(result: Result) -> list[dict[str, Any]]:
    """Rows of `per_request.jsonl`, a turn each; texts are left out, for they are not ours."""
    return [_turn_row(index, turn, result) for index, turn in enumerate(result.turns)]


def _turn_row(index: int, turn: Turn, result: Result) -> dict[str, Any]:
    row = {
        "index": index,
        "id": f"{turn.conversation.id}/{turn.turn}",
        "subset": result.data.subset,
        "category": turn.conversation.category,
        "sub_category": turn.conversation.sub_category,
        "turn": turn.turn,
    }
    if turn.completion is not None:
        return row | request_json(turn.completion)
    failure = turn.result
    assert isinstance(failure, RequestFailure)
    return row | {"error": {"class": failure.kind, "message": failure.message}}
