"""Files of measurements, cost tables and calibrations: read, refused for another pair or device."""

from dataclasses import replace
from pathlib import Path

from engine.config import MAX_THREADS, EngineConfig
from engine.dist.group import Group
from engine.errors import ConfigError
from engine.locate import checkpoint_digest
from engine.spec.calibration import Calibration
from engine.spec.cost_table import CostTable, about_file

PAIR = ("target", "draft", "num_speculative_tokens")
"""Of a fingerprint, what confidences depend on; the device has no part in it."""


def pair_fingerprint(
    config: EngineConfig, target: Path | None, draft: Path | None, gamma: int
) -> dict[str, str]:
    """The part of a fingerprint that is named in PAIR.

    Args:
        config: Names what has no folder: random weights.
        target: Folder of the target.
        draft: Folder of the draft.
        gamma: G.
    """
    return {
        "target": checkpoint_digest(target) if target else config.model,
        "draft": checkpoint_digest(draft) if draft else str(config.draft),
        "num_speculative_tokens": str(gamma),
    }


def read_cost_table(config: EngineConfig, fingerprint: dict[str, str]) -> CostTable | None:
    """The table of `--cost-table`; None if there is none.

    Args:
        config: Names the file.
        fingerprint: Of this engine; of the pair alone where the device is not known.

    Raises:
        ConfigError: It cannot be read, is damaged, or was made for something else.
    """
    if config.cost_table is None:
        return None
    table = CostTable.read(config.cost_table)
    asked = table
    if fingerprint.keys() == set(PAIR):
        asked = replace(table, fingerprint={n: table.fingerprint.get(n, "?") for n in PAIR})
    with about_file("--cost-table", config.cost_table):
        asked.check(fingerprint)
    return table


def read_calibration(config: EngineConfig, pair: dict[str, str], gamma: int) -> Calibration | None:
    """The calibration of `--calibration`; None if there is none.

    Args:
        config: Names the file.
        pair: As `pair_fingerprint`.
        gamma: G.

    Raises:
        ConfigError: It cannot be read, is damaged, or was made for another pair.
    """
    if config.calibration is None:
        return None
    calibration = Calibration.read(config.calibration)
    with about_file("--calibration", config.calibration):
        calibration.check(pair, gamma)
    return calibration


def threads_of_table(config: EngineConfig, group: Group, cores: int) -> int | None:
    """What a cost table was measured with: its times are of so many threads. Rank 0 reads it.

    Raises:
        ConfigError: This engine has fewer cores.
    """
    if config.cost_table is None:
        return None
    found = None
    if group.rank == 0:
        found = CostTable.read(config.cost_table).about.get("threads")
        found = found if isinstance(found, int) and 0 < found <= MAX_THREADS else None
    threads: int | None = group.tell(found)
    if threads is not None and threads > cores:
        raise ConfigError(
            f"--cost-table {config.cost_table} was measured with {threads} threads, this engine "
            f"has {cores} core{'' if cores == 1 else 's'}",
            f"measure it again with --threads {cores}",
        )
    return threads
