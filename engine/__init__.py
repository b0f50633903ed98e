"""DSpark inference engine: the names a caller may use; everything else is internal."""

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DSparkError,
    RequestError,
)
from engine.request import (
    Completion,
    FinishReason,
    Request,
    RequestFailure,
    Round,
    SamplingParams,
    Timing,
)
from engine.telemetry import EngineStats

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = [
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DSparkError",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "Request",
    "RequestError",
    "RequestFailure",
    "Round",
    "SamplingParams",
    "Timing",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, on first use (PEP 562): `--help` stays instant."""
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
