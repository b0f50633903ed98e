"""The report of a run: everything counted, and everything needed to run it again."""

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cli.job import Job, Tally
from dspark_cli.output import write_atomically
from dspark_cli.reader import Rows
from engine.errors import DSparkError
from engine.telemetry import EngineStats

if TYPE_CHECKING:
    from dspark_cli.compare import Comparison
    from engine.engine import Engine

_PACKAGES = ("dspark", "torch", "triton", "transformers", "tokenizers", "numpy")


def run_metrics(
    job: Job,
    rows: Rows,
    stats: EngineStats,
    run: dict[str, Any],
    seconds: float,
    comparison: "Comparison | None",
    phase: str = "done",
) -> dict[str, Any]:
    """Everything about a run as JSON.

    Args:
        job: What was done.
        rows: What was read.
        stats: The engine's counters; zero if it was not needed.
        run: The settings as they ran, or as asked for if the engine was not needed.
        seconds: Wall time of the loop, loading left out.
        comparison: With plain decoding, if that was asked for.
        phase: `done` or `interrupted`.
    """
    return {
        "phase": phase,
        "rows": {
            "lines": len(job.slots),
            "kept_from_earlier_runs": job.counts.kept,
            "done": job.counts.done,
            "failed": job.counts.failed,
            "by_finish_reason": dict(job.tally.finish),
            "failed_by_class": dict(job.tally.errors),
        },
        "speed": _speed(stats, seconds),
        "acceptance": _acceptance(stats, job.tally),
        "schedule": _schedule(stats),
        "engine": asdict(stats),
        "compare_plain": None if comparison is None else asdict(comparison),
        "manifest": {
            "argv": sys.argv,
            "settings": run,
            "input": {"sources": job.slots.sources, "rows_read": rows.read, "sha256": rows.sha256},
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": _versions(),
        },
    }


def ran(engine: "Engine") -> dict[str, Any]:
    """What became of settings that were left to the engine, under their options' names."""
    limits = engine.limits
    return {
        "dtype": engine.config.dtype,
        "device": engine.config.device,
        "num_speculative_tokens": engine.gamma,
        "verify": engine.config.verify or ("lagged" if engine.gamma else None),
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "enable_prefix_caching": engine.config.enable_prefix_caching,
    }


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Write the report.

    Raises:
        DSparkError: The disk refuses; the output is not concerned.
    """
    try:
        write_atomically(path, json.dumps(metrics, indent=2).encode() + b"\n")
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error.strerror}", "the output is whole") from None


def _speed(stats: EngineStats, seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 3),
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
        "counting": "committed tokens per round, bonus included, after the cut at the end",
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


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
