"""What is needed to run a measurement again and get the same: versions, device, command, hashes."""

import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = ("dspark", "torch", "triton", "transformers", "tokenizers", "numpy")


def manifest(
    *,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
    device: str | None = None,
    argv: list[str] | None = None,
) -> dict[str, Any]:
    """The content of `manifest.json`.

    Args:
        settings: The settings in effect, seeds included.
        inputs: Name -> what identifies an input: a hash, a row count, a checkpoint's digest.
        device: As the engine resolved it, `cpu` or `cuda`; None if none was used.
        argv: The command; this process's if None.
    """
    given = sys.argv if argv is None else argv
    return {
        "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["dspark", *given[1:]]),
        "settings": dict(settings),
        "inputs": dict(inputs),
        "device": None if device is None else describe_device(device),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
    }


def versions() -> dict[str, str | None]:
    """Installed packages that decide the numbers; None for one that is missing."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def describe_device(device: str) -> dict[str, Any]:
    """Name and size of the device; torch is asked only if it is loaded already."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {"type": device}
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {
            "type": device,
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return {"type": device, "machine": platform.machine(), "threads": torch.get_num_threads()}
