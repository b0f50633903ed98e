"""--shard I/N: which rows a run is to complete, and what its files are called."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import typer

MAX_SHARDS = 100_000


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of the input, by row id: rows that are added move no other row."""

    number: int
    """From 1."""

    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: "str | Shard") -> "Shard":
        """`2/8` is the second of eight.

        Raises:
            typer.BadParameter: It is not.
        """
        if isinstance(text, Shard):
            return text
        first, slash, second = text.partition("/")
        if not (slash and first.strip().isdecimal() and second.strip().isdecimal()):
            raise typer.BadParameter(f"{text!r} is not a shard; write 1/8 to 8/8 for eight of them")
        number, count = int(first), int(second)
        if not 1 <= count <= MAX_SHARDS:
            raise typer.BadParameter(f"{count} shards are out of range; give 1 to {MAX_SHARDS}")
        if not 1 <= number <= count:
            raise typer.BadParameter(f"there is no shard {text}; give 1/{count} to {count}/{count}")
        return cls(number, count)

    def holds(self, row_id: str | int) -> bool:
        """Whether a row is this shard's.

        Args:
            row_id: Its id; its index as text where it has none, or none that can be read.
        """
        name = str(row_id).encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(name, digest_size=8, person=b"dspark shard").digest()
        return int.from_bytes(digest, "little") % self.count == self.number - 1

    def path(self, path: Path) -> Path:
        """This shard's file in place of `path`: `out.shard-2-of-8.jsonl` for `out.jsonl`."""
        name = f"{path.stem}.shard-{self.number}-of-{self.count}{path.suffix}"
        return path.with_name(name)
