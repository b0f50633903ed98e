"""Texts of the command line to values; complaints name the value, the bounds and the fix."""

import math
from collections.abc import Callable
from typing import Any

import typer

from engine.errors import RequestError
from engine.request import SamplingParams

MAX_COUNT = 2**31 - 1
MAX_SIZE = 2**63 - 1
_REAL = ("temperature", "top_p", "min_p")
_LISTS = ("stop_token_ids",)
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str | int) -> int:
    """`32k` is 32 * 1024; `4G` or `4GiB` is 4 * 1024**3.

    Raises:
        typer.BadParameter: It is not a size.
    """
    if isinstance(text, int):
        return text
    digits = text.strip().lower().removesuffix("ib").removesuffix("b").replace("_", "")
    unit = _UNITS.get(digits[-1:], 1)
    digits = digits.removesuffix(digits[-1:]) if unit > 1 else digits
    try:
        value = round(float(digits) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a size; write 4096, 32k or 4G") from None
    if not 1 <= value <= MAX_SIZE:
        raise typer.BadParameter(f"{text} is out of range; give 1 to {MAX_SIZE}")
    return value


def whole(low: int, high: int = MAX_COUNT) -> Callable[[str | int], int]:
    """A parser of integers in a range, whose complaint names the value, the bounds and the fix."""

    def integer(text: str | int) -> int:
        value = _int(text)
        if not low <= value <= high:
            raise typer.BadParameter(f"{value} is out of range; give {low} to {high}")
        return value

    return integer


def real(low: float, high: float = math.inf) -> Callable[[str | float], float]:
    """As `whole`, for finite numbers."""

    def number(text: str | float) -> float:
        value = _float(text)
        if not (math.isfinite(value) and low <= value <= high):
            bounds = f"{low:g} to {high:g}" if high < math.inf else f"a finite number >= {low:g}"
            raise typer.BadParameter(f"{value} is out of range; give {bounds}")
        return value

    return number


def share(text: str | float) -> float:
    """A number above 0, up to 1.

    Raises:
        typer.BadParameter: It is none.
    """
    value = _float(text)
    if not 0.0 < value <= 1.0:
        raise typer.BadParameter(f"{value} is out of range; give more than 0, up to 1, as 0.9")
    return value


def counts(text: str) -> str:
    """`8,1,8` is `1,8`: sizes to measure at, rising, each once.

    Raises:
        typer.BadParameter: They are not numbers, or one is out of range.
    """
    return _counts(text, MAX_COUNT)


def counts_to(high: int) -> Callable[[str], str]:
    """As `counts`, none above `high`."""

    def sizes(text: str) -> str:
        return _counts(text, high)

    return sizes


def _counts(text: str, high: int) -> str:
    try:
        found = {int(part) for part in text.split(",")}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers; write 1,2,4,8") from None
    number = whole(1, high)
    return ",".join(str(number(each)) for each in sorted(found))


def sampling(name: str) -> Callable[[str | float], Any]:
    """A parser of one field of SamplingParams, which knows the bounds."""

    def value(text: str | float) -> Any:
        found = _float(text) if name in _REAL else _int(text)
        if name == "top_k" and found == -1:
            found = 0  # vLLM's way to keep all, in rows too
        fields: dict[str, Any] = {name: (found,) if name in _LISTS else found}
        try:
            SamplingParams(**fields)
        except RequestError as error:
            message = str(error).removeprefix(f"{name} ")
            raise typer.BadParameter(f"{message}; give a value in these bounds") from None
        return found

    return value


def _int(text: str | float) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer; write it in digits") from None


def _float(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; write it as 0.5") from None
