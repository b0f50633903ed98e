"""How long rounds take, by requests and verify tokens: what a budget is weighed against.

A round takes draft(R) + verify(R, tokens), a plain step plain(R), each measured for some R at
`context` KV tokens a request. Between measured points times are interpolated. What verification
takes is for the most part a matter of tokens: a batch between two measured ones, low and high, has
the times of low up to the tokens that high begins with, and of high from there on, both shifted by
what that many tokens cost in one and in the other. Every KV token beyond `context` adds its share.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError

SCHEMA, SCHEMA_VERSION = "dspark/cost-table", 1
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured time."""

    requests: int
    tokens: int
    """Target tokens; of a draft pass, R * G."""

    ms: float
    """Shortest milliseconds of several rounds."""

    spread: float
    """Median minus shortest, milliseconds."""


@dataclass(frozen=True, slots=True)
class KvCost:
    """Milliseconds per KV token of the batch beyond the measured context."""

    plain: float = 0.0
    round: float = 0.0


@dataclass(frozen=True)
class CostTable:
    """Measured times; see above. Every R measured has a draft, a plain and a full-verify cell."""

    fingerprint: dict[str, str]
    """Whose times these are: target, draft, device and what else decides them."""

    context: int
    draft: tuple[Cell, ...]
    plain: tuple[Cell, ...]
    verify: tuple[Cell, ...]
    kv: KvCost = KvCost()
    about: dict[str, Any] = field(default_factory=dict, compare=False)
    """For people: versions, shapes, when."""

    def __post_init__(self) -> None:
        """Refuse what cannot be looked up."""
        sizes = [c.requests for c in self.plain]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise _bad(f"plain steps at {sizes} requests do not ascend from 1")
        if [c.requests for c in self.draft] != sizes:
            raise _bad("draft and plain times are of different batch sizes")
        for size in sizes:
            if not any(c.requests == size and c.tokens > size for c in self.verify):
                raise _bad(f"no verify time at {size} requests")
        cells = (*self.draft, *self.plain, *self.verify)
        bad = next((c for c in cells if not (np.isfinite(c.ms) and c.ms > 0)), None)
        if bad is not None or not np.isfinite([self.kv.plain, self.kv.round]).all():
            raise _bad(f"times must be finite and > 0, got {bad or self.kv}")

    @property
    def max_requests(self) -> int:
        """Batches up to this size were measured."""
        return self.plain[-1].requests

    # what was looked up before: several sizes are, before every round
    @cached_property
    def _along(self) -> dict[tuple[str, int], float]:
        return {}

    @cached_property
    def _curves(self) -> dict[int, tuple[Floats, Floats]]:
        return {}

    @cached_property
    def _verified(self) -> dict[tuple[int, tuple[int, ...]], list[float]]:
        return {}

    def plain_ms(self, requests: int, kv_tokens: int) -> float:
        """A plain step of `requests` requests with `kv_tokens` KV tokens together."""
        beyond = kv_tokens - requests * self.context
        return max(self._along_requests("plain", requests) + beyond * self.kv.plain, 1e-6)

    def round_ms(self, requests: int, tokens: NDArray[np.int64], kv_tokens: int) -> Floats:
        """Rounds that draft and verify.

        Args:
            requests: R.
            tokens: [n] verify tokens, anchors included.
            kv_tokens: KV tokens of the batch together.

        Returns:
            [n] milliseconds.
        """
        fixed = self._fixed_ms(requests, kv_tokens)
        return np.maximum(fixed + self._verify_ms(requests, tokens), 1e-6)

    def each_round_ms(self, requests: int, tokens: tuple[int, ...], kv_tokens: int) -> list[float]:
        """`round_ms` of sizes that are asked for again and again."""
        key = requests, tokens
        if key not in self._verified:
            self._verified[key] = self._verify_ms(requests, np.array(tokens)).tolist()
        fixed = self._fixed_ms(requests, kv_tokens)
        return [max(fixed + ms, 1e-6) for ms in self._verified[key]]

    def _fixed_ms(self, requests: int, kv_tokens: int) -> float:
        """Of a round with drafts, whatever it verifies."""
        beyond = kv_tokens - requests * self.context
        return self._along_requests("draft", requests) + beyond * self.kv.round

    def _along_requests(self, kind: Literal["plain", "draft"], requests: int) -> float:
        key = kind, requests
        if key not in self._along:
            cells = self.plain if kind == "plain" else self.draft
            self._along[key] = self._interpolated(cells, requests)
        return self._along[key]

    def _interpolated(self, cells: Sequence[Cell], requests: int) -> float:
        sizes, times = [c.requests for c in cells], [c.ms for c in cells]
        # beyond the largest size measured: in proportion
        more = max(requests / sizes[-1], 1.0)
        return float(np.interp(min(requests, sizes[-1]), sizes, times)) * more

    def _verify_ms(self, requests: int, tokens: NDArray[np.int64]) -> Floats:
        """[n] milliseconds."""
        largest = self.max_requests
        if requests > largest:  # in proportion
            more = requests / largest
            return self._verify_ms(largest, (tokens / more).astype(np.int64)) * more
        if requests not in self._curves:
            self._curves[requests] = self._curve(requests)
        sizes, times = self._curves[requests]
        return np.interp(tokens, sizes, times)

    def _curve(self, requests: int) -> tuple[Floats, Floats]:
        """Tokens, and milliseconds that never fall along them, of a batch within the table."""
        sizes = [c.requests for c in self.plain]
        high = next(i for i, size in enumerate(sizes) if size >= requests)
        points = self._points(sizes[high])
        if high and sizes[high] > requests:
            first, meet = self._points(sizes[high - 1]), points[0][0]
            step = 0.0  # by request, at the same number of tokens
            if meet <= first[-1][0]:
                there = np.interp(meet, [t for t, _ in first], [ms for _, ms in first])
                step = (points[0][1] - float(there)) / (sizes[high] - sizes[high - 1])
            below = (requests - sizes[high - 1]) * step
            above = (sizes[high] - requests) * step
            points = [
                *((t, ms + below) for t, ms in first if t < meet),
                *((t, ms - above) for t, ms in points),
            ]
        columns = np.array(points)
        return columns[:, 0], np.maximum.accumulate(columns[:, 1])

    def _points(self, requests: int) -> list[tuple[int, float]]:
        """(tokens, milliseconds) at a measured size; anchors alone cost a plain step."""
        plain = next(c for c in self.plain if c.requests == requests)
        own = sorted((c.tokens, c.ms) for c in self.verify if c.requests == requests)
        return [(requests, plain.ms), *(p for p in own if p[0] > requests)]

    def check(self, fingerprint: dict[str, str]) -> None:
        """Refuse a table of another pair or device.

        Args:
            fingerprint: Of this engine.

        Raises:
            ConfigError: Names everything that differs.
        """
        check_fingerprint(self.fingerprint, fingerprint, "dspark profile")

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        return {**head, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "CostTable":
        """What `to_json` gave.

        Raises:
            ConfigError: It is not a cost table.
        """
        check_schema(values, SCHEMA, SCHEMA_VERSION)
        try:
            parts = {n: tuple(Cell(**c) for c in values[n]) for n in ("draft", "plain", "verify")}
            return cls(
                fingerprint=dict(values["fingerprint"]),
                context=int(values["context"]),
                kv=KvCost(**values["kv"]),
                about=dict(values["about"]),
                **parts,
            )
        except KeyError as error:
            raise _bad(f"{error.args[0]} is missing") from None
        except (TypeError, ValueError) as error:
            raise _bad(str(error)) from None

    @classmethod
    def read(cls, path: Path) -> "CostTable":
        """A file that `dspark profile` wrote.

        Raises:
            ConfigError: It cannot be read, or is not one.
        """
        with about_file("--cost-table", path):
            return cls.from_json(read_object(path))


def _bad(what: str) -> ConfigError:
    return ConfigError(f"the cost table is damaged: {what}", "make it again: dspark profile")


@contextmanager
def about_file(option: str, path: Path) -> Iterator[None]:
    """A context in which complaints are about a file: they begin with its option and name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option} {path}: {error}", error.hint) from None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), "name a file that dspark wrote") from None
    if not isinstance(values, dict):
        raise ConfigError("not a JSON object", "name a file that dspark wrote")
    return values


def check_schema(values: dict[str, Any], schema: str, version: int) -> None:
    """Refuse another kind or version of file."""
    found = values.get("schema"), values.get("schema_version")
    if found[0] != schema and str(found[0]).startswith("dspark/"):
        raise ConfigError(
            f"the file's schema is {found[0]!r}, this needs {schema!r}",
            "give it to the option it is for",
        )
    if found != (schema, version):
        raise ConfigError(
            f"the file's schema is {found[0]!r} version {found[1]!r}, this needs "
            f"{schema!r} version {version}",
            "make it again with this version of dspark",
        )


def check_fingerprint(theirs: dict[str, str], ours: dict[str, str], command: str) -> None:
    """Refuse a file that was made for something else.

    Args:
        theirs: Of the file.
        ours: Of this engine.
        command: What makes such a file.

    Raises:
        ConfigError: Names everything that differs.
    """
    names = sorted(theirs.keys() | ours.keys())
    differ = [n for n in names if theirs.get(n) != ours.get(n)]
    if differ:
        what = "; ".join(f"{n} is {ours.get(n)} here, {theirs.get(n)} there" for n in differ)
        raise ConfigError(
            f"the file was made for something else: {what}",
            "give --threads as there"
            if differ == ["device"] and "threads" in theirs["device"]
            else f"make one for this pair and device: {command}",
        )
