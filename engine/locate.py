"""A model's name -> a local folder: a path, `demo`, or a Hub id."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path
from typing import Literal

from engine.errors import CheckpointError

Role = Literal["target", "draft"]

_DEMO_PACKAGE = "dspark_demo"
_DEMO_FOLDERS = {
    ("demo", "target"): "target",
    ("demo", "draft"): "drafter",
    ("demo-rnn", "draft"): "drafter_rnn",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Weights, configs and tokenizers of the top folder; `original/` and the like are other formats.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*"]
_PIECE = 1 << 16


def locate(name: str, role: Role) -> Path:
    """Find a checkpoint, downloading it if it is a Hub id.

    `demo` (and for drafts `demo-rnn`) is the pair shipped with the package, also where a folder of
    that name exists: write `./demo` for the folder.

    Args:
        name: What the user gave.
        role: What it is to be used as.

    Returns:
        A folder with a config.json.

    Raises:
        CheckpointError: There is no such thing.
    """
    if name in ("demo", "demo-rnn"):
        return _checked(_demo(name, role))
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise CheckpointError(
            f"{name} is a file, not a checkpoint folder", f"give the folder: {path.parent}"
        )
    if name.startswith("shape:"):
        raise CheckpointError(
            f"{name} is random weights, which only `dspark bench` makes",
            "give a checkpoint folder or a Hub id",
        )
    if _looks_like_path(name, path):
        raise CheckpointError(f"the folder {name} does not exist", "check the path")
    return _checked(_download(name))


def _looks_like_path(name: str, path: Path) -> bool:
    """Not shaped like a Hub id, or its first part is a folder here."""
    return _HUB_ID.fullmatch(name) is None or path.parent.is_dir()


def _demo(name: str, role: Role) -> Path:
    folder = _DEMO_FOLDERS.get((name, role))
    if folder is None:
        raise CheckpointError(
            f"{name} is a draft, not a model", "use --model demo with --draft demo-rnn"
        )
    try:
        path = Path(str(files(_DEMO_PACKAGE))) / folder
    except ModuleNotFoundError:
        path = None
    if path is None or not path.is_dir():
        raise CheckpointError(
            f"this installation has no {name} {role} (package {_DEMO_PACKAGE})",
            "install dspark again, with its package data",
        )
    return path


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"the folder {folder} has no config.json", "give a Hugging Face checkpoint folder"
        )
    return folder


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    hint = "check the name and the network, or give a local folder"
    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        problem, hint = "is gated", "accept its licence on the Hub and log in with `hf auth login`"
    except RepositoryNotFoundError:
        problem = "does not exist there, or is private"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        problem = "is not in the local cache and the Hub cannot be reached"
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        problem = f"cannot be downloaded ({reason})"
    raise CheckpointError(
        f"{name} is not a local folder, and as a Hugging Face Hub id it {problem}", hint
    )


def checkpoint_digest(folder: Path) -> str:
    """Names a checkpoint by its files: small ones whole, weights by size and three pieces.

    Reading all weights would take as long as loading them; pieces tell fine-tunes apart.
    """
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(folder.glob("*")):
        if path.name != "config.json" and path.suffix != ".safetensors":
            continue
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as stream:
            for start in sorted({0, max(size // 2, 0), max(size - _PIECE, 0)}):
                stream.seek(start)
                total.update(stream.read(_PIECE))
    return total.hexdigest()
