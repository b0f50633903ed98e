"""The seam between a job and what completes its requests: one engine, replicas, or a cluster.

A job hands over prepared requests and takes results as they finish, whatever is behind it. Noise
is keyed by what is in the request, so that outputs cannot depend on it either.
"""

import platform
import socket
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

from engine.errors import ConfigError
from engine.request import Completion, Request, RequestFailure
from engine.telemetry import EngineStats

if TYPE_CHECKING:
    from engine.engine import Engine

_PACKAGES = ("dspark", "torch", "triton", "transformers", "tokenizers", "numpy")
_SAME = ("dtype", "max_model_len", "num_speculative_tokens")


class Front(Protocol):
    """What completes requests."""

    stats: EngineStats
    """Totals over all engines, kept up to date."""

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Each engine, as `describe` gives it."""
        ...

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion | RequestFailure]:
        """As Engine.run: each request as it finishes, refused ones at once.

        `requests` is consumed as there is room; None means "nothing yet, ask again".
        """
        ...

    def close(self) -> None:
        """End what was started for it; again does nothing."""
        ...


class Single:
    """One engine in this process."""

    def __init__(self, engine: "Engine") -> None:
        self.stats = engine.stats
        self.engines = [describe(engine)]
        self.run, self.follow, self.close = engine.run, engine.follow, engine.close


def describe(engine: "Engine") -> dict[str, Any]:
    """Where an engine runs and with what, as JSON.

    `settings` are those that were left to the engine, under their options' names.
    """
    limits, config = engine.limits, engine.config
    return {
        "host": socket.gethostname(),
        "device": _device_name(config.device),
        "processes": config.tensor_parallel_size or 1,
        "kv_cache": engine.stats.kv_account or None,
        "python": platform.python_version(),
        "packages": versions(),
        "settings": {
            "dtype": config.dtype,
            "device": config.device,
            "num_speculative_tokens": engine.gamma,
            "verify": config.verify or ("lagged" if engine.gamma else None),
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "enable_prefix_caching": config.enable_prefix_caching,
        },
    }


def check_same(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse engines whose outputs could differ.

    Args:
        first: An engine, as described.
        other: Another one.

    Raises:
        ConfigError: They serve other lengths or dtypes, or are other versions of dspark.
    """
    names = [name for name in _SAME if first["settings"][name] != other["settings"][name]]
    differ = [
        f"{name.replace('_', '-')} {first['settings'][name]} and {other['settings'][name]}"
        for name in names
    ]
    both = first["packages"]["dspark"], other["packages"]["dspark"]
    if both[0] != both[1]:
        differ.append(f"dspark {both[0]} and {both[1]}")
    if differ:
        where = f"on {first['host']} and {other['host']}"
        lengths = (first["settings"]["max_model_len"], other["settings"]["max_model_len"])
        raise ConfigError(
            f"the engines {where} would give different outputs: {', '.join(differ)}",
            f"give --max-model-len {min(lengths)}"
            if names == ["max_model_len"]
            else "give them the same devices and versions, or --dtype and --max-model-len",
        )


def versions() -> dict[str, str | None]:
    """Installed versions of what decides outputs and speed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _device_name(device: str) -> str:
    if device != "cuda":
        return platform.machine()
    import torch

    return torch.cuda.get_device_name()
