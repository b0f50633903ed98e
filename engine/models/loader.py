"""Weights from safetensors, with a ledger: every tensor in the files is used, or it is an error."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.models.headers import TensorHeader, read_headers
from engine.models.shard import Part

IGNORABLE = {
    "*rotary_emb.inv_freq": "rope frequencies, which old files carry and the config determines",
    "t2d": "which target tokens the draft vocabulary holds: for training; d2t says it again",
}
"""Tensors that may stay unused, and why. Anything else left over is an error."""

Progress = Callable[[str, int, int], None]
_MOST_NAMES = 12


class Checkpoint:
    """The tensors of one folder; use as a context, then `finish`.

    Tensors come back as memory of their own: the files may change or go once loading is done.

    Args:
        folder: A checkpoint: model.safetensors, its shards with an index, or one safetensors file.
        on_progress: Called with (`load` and the folder's name, bytes read, bytes in all) after each
            tensor.

    Raises:
        CheckpointError: A file is missing or torn.
    """

    def __init__(self, folder: Path, on_progress: Progress | None = None) -> None:
        self._folder = folder
        self._on_progress = on_progress
        self._headers: dict[str, TensorHeader] = read_headers(folder)
        self._total = sum(header.nbytes for header in self._headers.values())
        self._done = 0
        self._used: set[str] = set()
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def folder(self) -> Path:
        """Where the files lie, and what belongs to them."""
        return self._folder

    @property
    def names(self) -> frozenset[str]:
        """Every tensor in the files."""
        return frozenset(self._headers)

    def has(self, name: str) -> bool:
        """Is there a tensor of this name?"""
        return name in self._headers

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        return self._header(name).shape

    def stored(self, name: str) -> str:
        """The dtype a tensor is stored in, as safetensors spells it."""
        return self._header(name).dtype

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Read one tensor, or a rank's part of it, and mark it used.

        Args:
            name: Its name in the file.
            shape: What the config says the whole tensor must be.
            dtype: Converted to this on the way; an integer tensor stays an integer.
            device: Where it goes.
            part: What to read of it; None reads all.

        Raises:
            CheckpointError: It is missing, or of another shape or kind.
        """
        file = self._check(name, shape, dtype)
        return self._deliver(name, _read(file, name, part), dtype, device)

    def take_raw(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stored: Mapping[str, torch.dtype],
        device: torch.device | str,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Read one tensor bit by bit: no number in it is converted.

        Args:
            name: Its name in the file.
            shape: What the config says the whole tensor must be.
            stored: By dtypes it may be stored in, what its bits are to be seen as.
            device: Where it goes.
            part: What to read of it; None reads all.

        Raises:
            CheckpointError: It is missing, or of another shape or dtype.
        """
        header = self._check_stored(name, shape, stored)
        file = self._check(name, shape, None)
        raw = _read(file, name, part).view(stored[header.dtype])
        owned = raw.to(device=device, copy=True).contiguous()
        self._mark(name)
        return owned

    def _check_stored(
        self, name: str, shape: tuple[int, ...], stored: Mapping[str, torch.dtype]
    ) -> TensorHeader:
        header = self._check_header(name, shape, None)
        if header.dtype not in stored:
            raise CheckpointError(
                f"{self._folder}: tensor {name} must be {' or '.join(stored)}, got {header.dtype}",
                "use a checkpoint in a format that is served",
            )
        return header

    def check_copy(self, name: str, of: str, part: Part | None = None) -> None:
        """Use up a tensor that must repeat another one, e.g. the lm_head of a tied target.

        Args:
            name: The copy; nothing happens when the file has none.
            of: The tensor it must equal.
            part: What to compare, of both; None compares all.

        Raises:
            CheckpointError: They differ.
        """
        if not self.has(name):
            return
        shape = self.shape(of)
        file, other = self._check(name, shape, None), self._check(of, shape, None)
        if not torch.equal(_read(file, name, part), _read(other, of, part)):
            raise CheckpointError(
                f"{self._folder}: {name} differs from {of}, but the config ties them",
                "set tie_word_embeddings to false in config.json, or use a consistent checkpoint",
            )
        self._mark(name)

    def finish(self, leave: Callable[[str], bool] | None = None) -> None:
        """Refuse tensors that nobody took.

        Args:
            leave: Which names are another network's business, in files that hold two.

        Raises:
            CheckpointError: Names them.
        """
        left = sorted(
            name
            for name in self._headers.keys() - self._used
            if not any(fnmatch(name, pattern) for pattern in IGNORABLE)
            and not (leave is not None and leave(name))
        )
        if left:
            raise CheckpointError(
                f"{self._folder}: {len(left)} tensors are not part of the network its config.json "
                f"describes: {_listed(left)}",
                "use the config.json that belongs to these weights",
            )
        if self._on_progress is not None:
            self._on_progress(f"load {self._folder.name}", self._total, self._total)

    def _header(self, name: str) -> TensorHeader:
        try:
            return self._headers[name]
        except KeyError:
            leaf = name.rsplit(".", 2)[-2:]
            alike = sorted(n for n in self._headers if n.rsplit(".", 2)[-2:] == leaf)
            found = f"; similar: {_listed(alike, 3)}" if alike else ""
            raise CheckpointError(
                f"{self._folder}: tensor {name} is missing{found}",
                "use the config.json that belongs to these weights, or download them again",
            ) from None

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Any:
        """The open file that holds a tensor of this shape and kind."""
        header = self._check_header(name, shape, dtype)
        if header.file not in self._files:
            try:
                opened = safe_open(str(header.file), framework="pt", device="cpu")
                self._files[header.file] = self._stack.enter_context(opened)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"cannot read {header.file}: {error}", "download the checkpoint again"
                ) from None
        return self._files[header.file]

    def _check_header(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
    ) -> TensorHeader:
        header = self._header(name)
        if header.shape != tuple(shape):
            raise CheckpointError(
                f"{self._folder}: tensor {name} must have shape {list(shape)} by config.json, "
                f"got {list(header.shape)}",
                "use the config.json that belongs to these weights",
            )
        if dtype is not None and dtype.is_floating_point != _is_float(header.dtype):
            raise CheckpointError(
                f"{self._folder}: tensor {name} must be "
                f"{'F32, F16 or BF16' if dtype.is_floating_point else 'an integer'}, "
                f"got {header.dtype}",
                "use an unquantised checkpoint",
            )
        return header

    def _deliver(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        if torch.device(device).type == "cuda" and tensor.dtype != dtype:
            tensor = tensor.to(device)  # the device converts faster than the host
        # copy=True: what safetensors returns may be the mapped file itself
        owned = tensor.to(device=device, dtype=dtype, copy=True).contiguous()
        self._mark(name)
        return owned

    def _mark(self, name: str) -> None:
        if name in self._used:
            return
        self._used.add(name)
        self._done += self._headers[name].nbytes
        if self._on_progress is not None:
            self._on_progress(f"load {self._folder.name}", self._done, self._total)


class Outline(Checkpoint):
    """The same ledger over headers alone: tensors come back without memory, on the meta device."""

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Check and mark one tensor, and stand in for it."""
        self._check_header(name, shape, dtype)
        self._mark(name)
        held = shape if part is None else part.of(shape)
        return torch.empty(held, dtype=dtype, device="meta")

    def take_raw(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        stored: Mapping[str, torch.dtype],
        device: torch.device | str,
        part: Part | None = None,
    ) -> torch.Tensor:
        """Check and mark one tensor, and stand in for its bits."""
        header = self._check_stored(name, shape, stored)
        self._mark(name)
        held = shape if part is None else part.of(shape)
        return torch.empty(held, dtype=stored[header.dtype], device="meta")


def _read(file: Any, name: str, part: Part | None) -> torch.Tensor:
    """A tensor of an open file, or a part."""
    if part is None:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    index = [slice(None)] * part.dim + [slice(part.start, part.stop)]
    cut: torch.Tensor = file.get_slice(name)[tuple(index)]
    return part.pad(cut)


def _is_float(dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16")


def _listed(names: list[str], most: int = _MOST_NAMES) -> str:
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
