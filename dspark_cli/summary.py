"""What a person is told when a run is over."""

from pathlib import Path

from dspark_cli.job import Job
from dspark_cli.journal import Journal
from dspark_cli.output import OutputPaths
from dspark_cli.progress import Counts, clock
from engine.telemetry import EngineStats


def interrupted(counts: Counts, journal: Journal, rows: Path | None, written: bool) -> str:
    """How far a run came that was stopped.

    Args:
        counts: Its lines by state.
        journal: Its journal.
        rows: Its output, None for stdout.
        written: Whether that was written before.
    """
    of = "" if counts.total is None else f" of {counts.total}"
    has = "" if counts.total is None else f" (the input asks for {counts.total})"
    recorded = len(journal)
    if rows is None:
        return f"interrupted after {counts.settled}{of} lines"
    if written:
        return f"interrupted after {rows} was written"
    if recorded > counts.settled:  # rows of earlier runs, not all looked at yet
        return (
            f"interrupted: {recorded} lines of this and earlier runs are kept in "
            f"{journal.path}{has}; run the same command again "
            f"to go on ({rows} is written at the end)"
        )
    return (
        f"interrupted: {counts.settled}{of} lines are done and kept in {journal.path}; run "
        f"the same command again to go on ({rows} is written at the end)"
    )


def summary(job: Job, stats: EngineStats, seconds: float, paths: OutputPaths) -> list[str]:
    """A finished run in a few lines.

    Args:
        job: What was done.
        stats: The engines' counters.
        seconds: Wall time of the loop.
        paths: What was written.
    """
    counts = job.counts
    lines = []
    if counts.done:
        speed = stats.output_tokens / max(seconds, 1e-9)
        text = f"{counts.done} lines in {clock(seconds)}, {stats.output_tokens} tokens, "
        text += f"{speed:.1f} tokens/s"
        if stats.rounds:
            text += f", acceptance length {stats.acceptance_length:.2f}"
        lines.append(text)
    elif counts.kept:
        lines.append("nothing left to do")
    if counts.kept:
        lines.append(f"{counts.kept} lines were done before")
    if stats.out_of_memory:
        lines.append(
            f"{stats.out_of_memory} steps ran out of memory; at most {stats.max_num_seqs} "
            f"requests at once fitted in the end"
        )
    cut = job.tally.finish["length"]
    if cut:
        lines.append(f"{cut} of {counts.done} were cut at the limit (finish_reason length)")
    if counts.failed:
        kinds = ", ".join(f"{count} {kind}" for kind, count in job.tally.errors.most_common())
        lines.append(f"{counts.failed} lines failed ({kinds}): see {paths.errors or 'stdout'}")
    if paths.rows is not None:
        lines.append(f"wrote {paths.rows}")
    return lines
