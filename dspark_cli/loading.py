"""An engine that is ready to run: loaded, and with the costs of its rounds known."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dspark_cli import backend
from dspark_cli.progress import LoadProgress
from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.engine import Engine


def load(
    config: EngineConfig, *, quiet: bool, say: Callable[[str], None], rows: int | None = None
) -> "Engine":
    """Load an engine, and measure what rounds cost if that matters and nobody did.

    Args:
        config: The settings.
        quiet: Show no progress.
        say: Told how long measuring took.
        rows: Requests to come, if that is known: fewer of them at once need less measuring.

    Raises:
        DSparkError: The checkpoints, files or settings cannot be served.
    """
    progress = LoadProgress(quiet)
    try:
        engine, spent = make(config, progress, rows)
    finally:
        progress.close()
    if spent is not None:
        say(
            f"measured in {spent:.1f} s what rounds cost (dspark profile -o FILE, then "
            "--cost-table FILE, does it once)"
        )
    return engine


def make(
    config: EngineConfig, on_progress: Callable[[str, int, int], None], rows: int | None
) -> tuple["Engine", float | None]:
    """As `load`, telling nobody.

    Returns:
        The engine, and the seconds that measuring took; None if there was nothing to measure.
    """
    engine = backend.load_engine(config, on_progress)
    most = engine.limits.max_num_seqs
    return engine, engine.prepare(most if rows is None else max(1, min(rows, most)))
