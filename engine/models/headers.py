"""The tensors of a checkpoint folder, from the safetensors headers alone: no torch, no weights.

Also the single place that decides which files of a folder make up the checkpoint.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.models.config_reader import read_json

INDEX = "model.safetensors.index.json"
_AGAIN = "download the checkpoint again"
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
# Far above any real header; a larger length field means the file is not safetensors.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """As safetensors spells it: F32, BF16, F16, I64, BOOL, ..."""

    shape: tuple[int, ...]
    start: int
    """First byte in the file."""

    nbytes: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, in name order.

    With an index, the files it lists; else model.safetensors; else the only safetensors file.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: Nothing to load, a shard is missing, or it is ambiguous what to load.
    """
    if (folder / INDEX).exists():
        files = sorted({folder / name for name in _weight_map(folder).values()})
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise CheckpointError(
                f"{folder}: {INDEX} lists {', '.join(missing)}, absent from the folder", _AGAIN
            )
        return files
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files ({found[0].name}, ...) but no {INDEX}",
            f"add {INDEX}, or keep the one file that holds the weights",
        )
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        raise CheckpointError(
            f"{folder} holds weights only as {pickled[0].name}; pickled weights are not loaded",
            "save the checkpoint with save_pretrained(..., safe_serialization=True)",
        )
    raise CheckpointError(
        f"{folder} holds no *.safetensors file", "give a folder with safetensors weights"
    )


def _weight_map(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map", _AGAIN)
    bad = [v for v in weight_map.values() if not isinstance(v, str) or v != os.path.basename(v)]
    if bad:
        raise CheckpointError(
            f"{folder / INDEX} must list file names inside the folder, got {bad[0]!r}", _AGAIN
        )
    return weight_map


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor in the checkpoint's files, indexed or not.

    Args:
        folder: The checkpoint.

    Raises:
        CheckpointError: A file is missing or torn, a tensor is in two files, or the index names a
            tensor that its file lacks.
    """
    headers: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        for name, header in read_file_headers(file).items():
            if name in headers:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in both {headers[name].file.name} and {file.name}",
                    _AGAIN,
                )
            headers[name] = header
    if (folder / INDEX).exists():
        for name, shard in _weight_map(folder).items():
            if name not in headers or headers[name].file.name != shard:
                raise CheckpointError(
                    f"{folder}: {INDEX} puts {name} in {shard}, which lacks it", _AGAIN
                )
    return headers


def read_file_headers(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file.

    Args:
        file: A *.safetensors file.

    Raises:
        CheckpointError: The file is unreadable or torn.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise _torn(file, f"{size} bytes end inside the header")
            table = json.loads(stream.read(length))
        entries = {n: _header(file, 8 + length, e) for n, e in table.items() if n != "__metadata__"}
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error}", "check the file's permissions"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _torn(file, f"bad header ({error})") from None
    end = max((h.start + h.nbytes for h in entries.values()), default=8 + length)
    if end != size:
        raise _torn(file, f"the header promises {end} bytes, the file has {size}")
    return entries


def _header(file: Path, data_start: int, entry: dict[str, Any]) -> TensorHeader:
    start, end = entry["data_offsets"]
    return TensorHeader(
        file, str(entry["dtype"]), tuple(map(int, entry["shape"])), data_start + start, end - start
    )


def _torn(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file} is torn or not safetensors: {problem}", _AGAIN)


def stored_dtype(headers: Mapping[str, TensorHeader]) -> str:
    """The dtype that holds most bytes, in torch's spelling (safetensors' for the exotic).

    Args:
        headers: From `read_headers`.
    """
    total: dict[str, int] = {}
    for header in headers.values():
        total[header.dtype] = total.get(header.dtype, 0) + header.nbytes
    most = max(total, key=lambda name: total[name]) if total else "none"
    return _NAMES.get(most, most)


def same_bytes(a: TensorHeader, b: TensorHeader, chunk: int = 1 << 24) -> bool:
    """Do two tensors hold the same bits, read in chunks?

    Args:
        a: One tensor.
        b: The other; another dtype or shape counts as different.
        chunk: Bytes held at once.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb") as left, b.file.open("rb") as right:
        left.seek(a.start)
        right.seek(b.start)
        done = 0
        while done < a.nbytes:
            step = min(chunk, a.nbytes - done)
            if left.read(step) != right.read(step):
                return False
            done += step
    return True
