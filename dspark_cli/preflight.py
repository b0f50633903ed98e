"""Checks before anything slow starts: can the outcome be written where it should go?"""

import os
import shutil
import stat
from pathlib import Path

from dspark_cli.output import OutputPaths
from dspark_cli.reader import takes_in
from dspark_cli.sources import LinesFile, ParquetFile, Source
from engine.errors import ConfigError

MIN_FREE_BYTES = 16 << 20
_TOKEN_BYTES = 24  # an id and its text, in the journal and in OUT


def check_places(
    paths: OutputPaths, given: str, sources: list[Source], reports: list[Path]
) -> None:
    """Refuse places that cannot be written, or must not be.

    Args:
        paths: The run's files.
        given: The input, as it was given.
        sources: The input, as it was found.
        reports: Other files the run writes.

    Raises:
        ConfigError: One of them will not do.
    """
    inputs = [s.path.resolve() for s in sources if isinstance(s, LinesFile | ParquetFile)]
    written = [p for p in (paths.rows, paths.errors, paths.journal) if p is not None] + reports
    seen: dict[Path, Path] = {}
    for path in written:
        real = path.resolve()
        if real in inputs:
            raise ConfigError(f"{path} is both input and output", "choose another -o")
        if real in seen:
            raise ConfigError(f"{path} would be written twice", "choose different names")
        if takes_in(given, path):
            raise ConfigError(
                f"{path} would lie among the rows of {given}: the next run would read it as input",
                "write elsewhere, or name the input so that it leaves this file out",
            )
        seen[real] = path
        _check_writable(path)


def check_space(folder: Path, lines: int | None, max_tokens: int) -> str | None:
    """Look at the free disk space.

    Args:
        folder: Where the output goes.
        lines: Output lines to come, None if unknown.
        max_tokens: Tokens of each at most.

    Returns:
        A warning, if all rows at full length would not fit.

    Raises:
        ConfigError: There is next to none.
    """
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ConfigError(f"{folder} has only {free >> 20} MiB free", "free some space")
    most = (lines or 0) * max_tokens * _TOKEN_BYTES
    if most <= free:
        return None
    return (
        f"{folder} has {free / 2**30:.1f} GiB free; at full length the rows need {most / 2**30:.1f}"
    )


def _check_writable(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder} for {path.name}", f"mkdir -p {folder}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "choose another name") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise ConfigError(f"{path} is a folder", "give a file name")
    if mode is not None and not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is not an ordinary file", "use -o - for stdout")
    probe = folder / f".{path.name}.{os.getpid()}.probe"
    try:
        probe.touch()  # os.access does not know read-only mounts and quotas
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write into {folder}: {error.strerror}", "choose another"
        ) from None
    if mode is not None and not os.access(path, os.W_OK):
        raise ConfigError(f"{path} is write-protected", "choose another name, or chmod it")
