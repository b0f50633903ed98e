"""What ranks have to agree on before they compute together, in a few bytes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.config import EngineConfig

_PIECE = 1 << 16
_PIECES = 8


def identity(config: EngineConfig, *folders: Path | None) -> dict[str, str]:
    """Facts for `Group.compare`.

    Args:
        config: The settings.
        folders: Checkpoints: target, draft; None where there is none.
    """
    facts = {
        "settings": _short(json.dumps(config.to_json(), sort_keys=True).encode()),
        "torch": torch.__version__,
        "dspark": _digest(sorted(Path(__file__).parents[1].rglob("*.py"))),
    }
    for role, folder in zip(("target", "draft"), folders, strict=True):
        if folder is not None:
            facts[f"{role} checkpoint"] = _digest(
                path
                for path in sorted(folder.glob("*"))
                if path.suffix in (".json", ".safetensors")
            )
    return facts


def _digest(files: Iterable[Path]) -> str:
    """Names, sizes, and evenly spaced pieces: whole weights would take as long as loading them."""
    total = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as stream:
            for start in sorted({max(size - _PIECE, 0) * i // _PIECES for i in range(_PIECES + 1)}):
                stream.seek(start)
                total.update(stream.read(_PIECE))
    return total.hexdigest()


def _short(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
