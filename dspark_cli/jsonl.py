"""Strict JSON, one object a line: unambiguous when read, split at \\n only when written."""

import json
import math
from typing import Any, NoReturn

from engine.errors import RequestError

BOM = b"\xef\xbb\xbf"

# Line breaks to str.splitlines() and to some editors, but not to JSON: escaped when written.
_BREAKS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


def loads(line: bytes) -> dict[str, Any]:
    """Read one row.

    Args:
        line: One line of the input, with or without its line break.

    Returns:
        The object on the line.

    Raises:
        RequestError: Kind `parse` for text that is not one unambiguous JSON value, `schema` for a
            value that is not an object.
    """
    try:
        text = line.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            "parse",
            f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line",
            "convert the file to UTF-8, for instance with iconv",
        ) from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        raise RequestError(
            "parse",
            f"not JSON: {error.msg} at character {error.pos + 1} of the line",
            "fix the line",
        ) from None
    except RecursionError:
        raise RequestError("parse", "nested too deeply", "flatten the row") from None
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError("parse", f"not JSON: {error}", "fix the line") from None
    if "\\u" in text:
        _reject_half_pairs(value)
    if not isinstance(value, dict):
        raise RequestError(
            "schema",
            f"a row must be a JSON object, got {type_name(value)}",
            'write each row as {"prompt": "..."}',
        )
    return value


def dumps(value: object) -> bytes:
    """One line of UTF-8, break included."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for mark, escaped in _BREAKS.items():
        if mark in text:  # only ever inside a string: JSON has no other place for it
            text = text.replace(mark, escaped)
    return text.encode("utf-8", "replace") + b"\n"


def canonical(value: object) -> bytes:
    """The same bytes for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def type_name(value: object) -> str:
    """What JSON calls the type of `value`."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError("parse", f"the key {twice!r} appears twice in one object", "keep one")
    return value


def _no_constant(name: str) -> NoReturn:
    raise RequestError("parse", f"{name} is not JSON", "use null, or leave the field out")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise RequestError("parse", f"the number {text[:40]} is too large", "use a smaller number")
    return value


def _reject_half_pairs(value: object) -> None:
    """A lone \\ud800 is valid JSON but not text: no tokenizer and no UTF-8 file can hold it."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise RequestError(
            "parse", f"\\u{half:04x} is half of a surrogate pair", "write the whole character"
        ) from None
