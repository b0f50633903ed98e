"""One loader for the layouts in which SPEED-Bench files are found; the row tells which it is."""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from evals.speed_bench.placeholders import is_placeholder, source_name

CONFIGS = (
    "qualitative",
    "throughput_1k",
    "throughput_2k",
    "throughput_8k",
    "throughput_16k",
    "throughput_32k",
)
TIERS = ("low_entropy", "mixed", "high_entropy")
"""Categories of the throughput configs: how predictable the output is."""

LAYOUTS = {
    "hub": "the published parquet, texts of third parties missing",
    "model-optimizer": "parquet, `turns` a list of all user turns",
    "nemo-skills": "JSONL, `messages` the user messages",
    "vllm": "a folder of such JSONL files, one a config",
    "sglang": "JSONL, `turns` a list",
    "speculators": "JSONL files by category, `turns` the first turn as a string",
}

_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")
# longest first: throughput_16k also starts with throughput_1
_CONFIG = re.compile("|".join(sorted(CONFIGS, key=len, reverse=True)))


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row: what a user says, turn by turn."""

    id: str
    category: str
    sub_category: str
    turns: tuple[str, ...]
    source: str
    src_id: str
    file: str
    row: int
    """Record in its file, from 1."""

    @property
    def is_placeholder(self) -> bool:
        """Is its text missing?"""
        return is_placeholder(self.turns)

    @property
    def tier(self) -> str | None:
        """The entropy tier, in throughput configs."""
        return self.category if self.category in TIERS else None


@dataclass(frozen=True, slots=True)
class SpeedBench:
    """A config as read."""

    layout: str
    """A key of LAYOUTS."""

    config: str
    """One of CONFIGS, or the file's name."""

    subset: str
    """`config`, or the name of the part of it that is here; belongs beside every number."""

    conversations: tuple[Conversation, ...]
    first_turn_only: bool
    """Does the layout hold no later turns?"""

    @property
    def sha256(self) -> str:
        """Digest of all turns, in order: equal texts give equal digests in every layout."""
        digest = hashlib.sha256()
        for row in self.conversations:
            digest.update(json.dumps([row.category, row.turns]).encode())
        return digest.hexdigest()

    @property
    def placeholders(self) -> tuple[Conversation, ...]:
        """Rows whose text is missing."""
        return tuple(row for row in self.conversations if row.is_placeholder)


def load(path: Path, config: str | None = None) -> SpeedBench:
    """Read a file or a folder.

    Args:
        path: A .jsonl, .jsonl.gz or .parquet file, or a folder of them.
        config: Which config to read where a folder holds several.

    Raises:
        ConfigError: It is not SPEED-Bench in a known layout, or a row is damaged.
    """
    name, files = _choose(path, config)
    rows: list[Conversation] = []
    shapes: set[str] = set()
    subsets: set[str] = set()
    for file in files:
        key = _category_in_name(file, name)
        for number, record in enumerate(_records(file), 1):
            shapes.add(shape := _shape(record, file, number))
            rows.append(_conversation(record, shape, key, file, number))
            subsets.add(str(record.get("subset") or name))
    if not rows:
        raise ConfigError(f"{path} holds no rows", "write one JSON object a line")
    if len(shapes) > 1:
        raise ConfigError(f"{path} mixes layouts: {', '.join(sorted(shapes))}", "give one file")
    _check_ids(rows)
    (shape,) = shapes
    return SpeedBench(
        layout=_layout(shape, files[0], path.is_dir(), rows),
        config=name,
        subset="+".join(sorted(subsets)),
        conversations=tuple(rows),
        first_turn_only=shape == "string",
    )


def clean(data: SpeedBench) -> SpeedBench:
    """Leave placeholders out, and say so in the subset's name.

    Sources that are missing as a whole name the subset; the row count always does.

    Args:
        data: As read.

    Raises:
        ConfigError: Nothing is left.
    """
    missing = {row.id for row in data.placeholders}
    if not missing:
        return data
    kept = tuple(row for row in data.conversations if row.id not in missing)
    if not kept:
        raise ConfigError(
            f"all {len(missing)} rows of {data.subset} are placeholders",
            "run `dspark data speed-bench prepare`, which tells what is needed",
        )
    name = subset_name(data.subset, [row.source for row in data.placeholders], kept, data)
    return replace(data, subset=name, conversations=kept)


def subset_name(
    base: str, left_out: list[str], kept: tuple[Conversation, ...], data: SpeedBench
) -> str:
    """`qualitative-no-hle-672of880`: what is missing and how much is left."""
    gone = sorted({source_name(source) for source in left_out})
    what = "no-" + "-".join(gone) if len(gone) <= 2 else "clean"
    return f"{base}-{what}-{len(kept)}of{len(data.conversations)}"


def narrow(data: SpeedBench, categories: tuple[str, ...], limit: int | None) -> SpeedBench:
    """Keep some categories, then the first rows; the subset's name says so.

    Args:
        data: As read.
        categories: To keep; all if there are none.
        limit: Rows at most.

    Raises:
        ConfigError: There is no such category.
    """
    there = {row.category for row in data.conversations}
    unknown = [name for name in categories if name not in there]
    if unknown:
        raise ConfigError(
            f"no category {unknown[0]} in {data.subset}", f"choose from {', '.join(sorted(there))}"
        )
    rows = [row for row in data.conversations if not categories or row.category in categories]
    kept = tuple(rows[:limit])
    name = "-".join((data.subset, *categories))
    if limit is not None and len(kept) < len(rows):
        name += f"-first-{len(kept)}of{len(rows)}"
    return replace(data, subset=name, conversations=kept)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL or parquet file, or of a JSON array, as they are.

    Raises:
        ConfigError: The file cannot be read.
    """
    yield from _records(path)


def _choose(path: Path, config: str | None) -> tuple[str, list[Path]]:
    """The config's name and its files."""
    if path.is_file():
        found = _config_of(path)
        return config or found or path.name.split(".")[0], [path]
    if not path.is_dir():
        raise ConfigError(f"no such file or folder: {path}", "check the path")
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and p.name.endswith(_SUFFIXES)]
    by_config: dict[str, list[Path]] = {}
    for file in files:
        if (found := _config_of(file)) is not None:
            by_config.setdefault(found, []).append(file)
    if config is None and len(by_config) == 1:
        config = next(iter(by_config))
    if config in by_config:
        return config, _one_container(by_config[config])
    there = ", ".join(by_config) or "none"
    raise ConfigError(
        f"{path} holds these SPEED-Bench configs: {there}", "choose one with --subset"
    )


def _one_container(files: list[Path]) -> list[Path]:
    """`qualitative.jsonl` alone where its per-category files lie beside it."""
    whole = [p for p in files if _config_of(p) == p.name.split(".")[0]]
    return whole[:1] or files


def _config_of(path: Path) -> str | None:
    """The config a path names: its file name first, then its folder."""
    for name in (path.name, path.parent.name):
        if match := _CONFIG.match(name):
            return match[0]
    return None


def _category_in_name(path: Path, config: str) -> tuple[str, str]:
    """(category, sub-category) of a file `config_category__sub.jsonl`."""
    stem = path.name.split(".")[0]
    rest = stem.removeprefix(config).removeprefix("_") if stem.startswith(config) else ""
    category, _, sub = rest.partition("__")
    return category, sub


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.name.endswith(".parquet"):
        yield from _parquet(path)
        return
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as stream:
            first = stream.read(1)
            stream.seek(0)
            if first == b"[":
                yield from json.loads(stream.read())
                return
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _object(line, path, number)
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "check the file") from None


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path} line {number} is not JSON: {error}", "fix the line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} line {number} is not a JSON object", "fix the line")
    return value


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise ConfigError(f"reading {path} needs pyarrow", "pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "check the file") from None


def _shape(record: Mapping[str, Any], path: Path, number: int) -> str:
    """How a row holds its turns."""
    turns, messages = record.get("turns"), record.get("messages")
    if isinstance(turns, str):
        return "string"
    if isinstance(turns, list):
        return "turns"
    if isinstance(messages, list):
        return "messages"
    raise ConfigError(
        f"{path} row {number} is not a SPEED-Bench row: it has neither turns nor messages",
        f"make the files with: {PREPARE}",
    )


PREPARE = "dspark data speed-bench prepare FILE -o OUT.jsonl"


def _layout(shape: str, file: Path, in_folder: bool, rows: list[Conversation]) -> str:
    if shape == "string":
        return "speculators"
    if shape == "messages":
        return "vllm" if in_folder else "nemo-skills"
    if not file.name.endswith(".parquet"):
        return "sglang"
    return "hub" if any(row.is_placeholder for row in rows) else "model-optimizer"


def _conversation(
    record: Mapping[str, Any], shape: str, key: tuple[str, str], file: Path, number: int
) -> Conversation:
    where = f"{file} row {number}"
    if shape == "string":
        turns: list[Any] = [record["turns"]]
    elif shape == "turns":
        turns = record["turns"]
    else:
        turns = [_user_text(message, where) for message in record["messages"]]
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ConfigError(f"{where} has an empty turn", "make the file again")
    return Conversation(
        id=str(record.get("question_id") or f"{file.name.split('.')[0]}-{number}"),
        category=_slug(record.get("category") or key[0] or "unknown"),
        sub_category=_slug(record.get("sub_category") or key[1] or ""),
        turns=tuple(turns),
        source=str(record.get("source") or ""),
        src_id=str(record.get("src_id") or ""),
        file=file.name,
        row=number,
    )


def _slug(name: object) -> str:
    """As file names spell it, so that all layouts agree."""
    return str(name).replace(" ", "_").replace("/", "_")


def _user_text(message: object, where: str) -> object:
    if not isinstance(message, dict) or message.get("role") != "user":
        raise ConfigError(
            f"{where}: `messages` must hold user messages only; replies are the model's own",
            f"make the file again with: {PREPARE}",
        )
    return message.get("content")


def _check_ids(rows: list[Conversation]) -> None:
    seen: dict[str, Conversation] = {}
    for row in rows:
        if (first := seen.setdefault(row.id, row)) is not row:
            raise ConfigError(
                f"question_id {row.id} is in {first.file} row {first.row} and {row.file} row "
                f"{row.row}",
                "give one config at a time",
            )
