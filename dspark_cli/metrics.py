"""The report of a run: everything counted, and everything needed to run it again."""

import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cli.front import versions
from dspark_cli.job import Job, Tally
from dspark_cli.output import write_atomically
from dspark_cli.reader import Rows
from engine.errors import DSparkError
from engine.telemetry import EngineStats, merge

if TYPE_CHECKING:
    from dspark_cli.compare import Comparison


def run_metrics(
    rows: dict[str, int],
    tally: Tally,
    stats: EngineStats,
    seconds: float,
    manifest: dict[str, Any],
    comparison: "Comparison | None" = None,
    phase: str = "done",
    engine_seconds: float | None = None,
) -> dict[str, Any]:
    """Everything about a run as JSON.

    Args:
        rows: Lines of the output by what became of them, as `counted` gives them.
        tally: How this run's completions ended.
        stats: The counters of all engines; zero if none was needed.
        seconds: Wall time of the loop, loading left out.
        manifest: As `manifest_of` gives it.
        comparison: With plain decoding, if that was asked for.
        phase: `done`, `interrupted` or `failed`.
        engine_seconds: Of all engines together, 0 where that is not known; None: each was there
            all the time.
    """
    if engine_seconds is None:
        engine_seconds = seconds * len(manifest["engines"])
    return {
        "phase": phase,
        "rows": {
            **rows,
            "by_finish_reason": dict(tally.finish),
            "failed_by_class": dict(tally.errors),
        },
        "speed": _speed(stats, seconds, engine_seconds),
        "acceptance": _acceptance(stats, tally),
        "schedule": _schedule(stats),
        "engine": stats.to_json(),
        "compare_plain": None if comparison is None else asdict(comparison),
        "manifest": manifest,
    }


def counted(job: Job) -> dict[str, int]:
    """Lines of a job by what became of them."""
    return {
        "lines": len(job.slots),
        "kept_from_earlier_runs": job.counts.kept,
        "done": job.counts.done,
        "failed": job.counts.failed,
    }


def manifest_of(
    settings: dict[str, Any], rows: Rows, engines: list[dict[str, Any]]
) -> dict[str, Any]:
    """What is needed to run it again.

    Args:
        settings: As they ran, or as asked for if no engine was needed.
        rows: What was read.
        engines: What ran where, as `front.describe` gives it.
    """
    sources = [source.name for source in rows.sources]
    return {
        "argv": sys.argv,
        "settings": settings,
        "input": {"sources": sources, "rows_read": rows.read, "sha256": rows.sha256},
        "engines": engines,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
    }


def merge_metrics(many: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of several shards as those of one run.

    Counts are added up; `seconds` is the longest, as of shards that ran at the same time, and the
    speed goes by it. The manifest is the first one's, with every shard's engines and times.
    """
    names = ("lines", "kept_from_earlier_runs", "done", "failed")
    rows = {name: sum(each["rows"][name] for each in many) for name in names}
    tally = Tally()
    for each in many:
        tally.finish.update(each["rows"]["by_finish_reason"])
        tally.errors.update(each["rows"]["failed_by_class"])
        found = each["acceptance"]
        if found is not None and found["rows"]:
            tally.acceptance_rows += found["rows"]
            tally.acceptance_sum += found["rows"] * found["acceptance_length_mean_per_row"]
    manifest = dict(many[0]["manifest"])
    manifest["engines"] = [e for each in many for e in each["manifest"]["engines"]]
    manifest["shards"] = [
        {
            "shard": each["manifest"]["settings"]["shard"],
            "seconds": each["speed"]["seconds"],
            "argv": each["manifest"]["argv"],
        }
        for each in many
    ]
    manifest["settings"] = {k: v for k, v in manifest["settings"].items() if k != "shard"}
    stats = merge(EngineStats.from_json(each["engine"]) for each in many)
    seconds = max(each["speed"]["seconds"] for each in many)
    phase = "done" if all(each["phase"] == "done" for each in many) else "interrupted"
    each_seconds = [each["speed"]["seconds"] * len(each["manifest"]["engines"]) for each in many]
    shares = [each["speed"].get("device_share") for each in many]
    unknown = any(s and share is None for s, share in zip(each_seconds, shares, strict=True))
    together = 0.0 if unknown else sum(each_seconds)
    return run_metrics(rows, tally, stats, seconds, manifest, phase=phase, engine_seconds=together)


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Write the report.

    Raises:
        DSparkError: The disk refuses; the output is not concerned.
    """
    try:
        write_atomically(path, json.dumps(metrics, indent=2).encode() + b"\n")
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error.strerror}", "the output is whole") from None


def _speed(stats: EngineStats, seconds: float, engine_seconds: float) -> dict[str, Any]:
    worked = sum(stats.seconds.get(name, 0.0) for name in ("prefill", "draft", "verify"))
    return {
        "seconds": round(seconds, 3),
        # of the loop: from the first to the last launch of each prefill, draft and verification
        "device_share": round(min(worked / engine_seconds, 1.0), 4) if engine_seconds else None,
        "seconds_by_phase": {name: round(spent, 3) for name, spent in stats.seconds.items()},
        "output_tokens": stats.output_tokens,
        "output_tokens_per_second": round(stats.output_tokens / seconds, 2) if seconds else None,
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_tokens,
    }


def _acceptance(stats: EngineStats, tally: Tally) -> dict[str, Any] | None:
    if not stats.rounds:
        return None
    mean = tally.acceptance_sum / tally.acceptance_rows if tally.acceptance_rows else None
    return {
        "counting": "committed tokens per round in which drafts were verified, bonus included, "
        "after the cut at the end",
        "acceptance_length": round(stats.acceptance_length, 4),
        "committed": stats.committed,
        "rounds": stats.rounds,
        "acceptance_length_mean_per_row": None if mean is None else round(mean, 4),
        "rows": tally.acceptance_rows,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "by_position": [
            {
                "position": at,
                "accepted": accepted,
                "drafted": drafted,
                "rate": round(accepted / drafted, 4) if drafted else None,
            }
            for at, (accepted, drafted) in enumerate(
                zip(stats.accepted_at, stats.drafted_at, strict=True)
            )
        ],
    }


def _schedule(stats: EngineStats) -> dict[str, Any] | None:
    """What was verified: sums are in `engine.schedule`."""
    done = stats.schedule
    if not done.requests:
        return None
    error = done.calibration_error
    return {
        "rounds_by_path": dict(done.rounds),
        "drafts_verified_per_request_round": round(done.mean_budget, 4),
        "target_tokens_scheduled": done.scheduled,
        "target_tokens_computed": done.tokens,
        "padding_share": round(done.padding_share, 4),
        "rounds_without_graph": done.eager,
        "graphs_captured": done.captures,
        "predicted_tokens": round(done.predicted, 1),
        "realised_tokens": done.realised,
        "calibration_error": None if error is None else round(error, 4),
        "plans_told": done.plans_told,
        "plan_seconds": round(done.plan_seconds, 6),
        "plan_exposed_seconds": round(done.plan_exposed_seconds, 6),
        "audits": done.audits,
        "audit_seconds": round(done.audit_seconds, 6),
    }
