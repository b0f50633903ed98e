r"""The five ways to read an answer out of a text, all run on every row.

    strict          the text after the recipe's marker, first occurrence (lm-eval)
    flexible        the last thing that looks like a number, commas and dots included (lm-eval)
    boxed           the number in the last \boxed{...}
    digits_only     the last run of digits, signs and decimals ignored (vLLM's and SGLang's tests)
    signed_decimal  the number after the last marker (####, \boxed, "the answer is"), else the last
                    one in the text; signs, decimals, $, %, thousands separators and markup are
                    understood, and 18.0 equals 18

The patterns of `strict`, `flexible` and `digits_only` are facts about those tools: they are kept as
they are, mistakes included, so that numbers can be compared.
"""

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

EXTRACTORS = ("strict", "flexible", "boxed", "digits_only", "signed_decimal")

# lm_eval/tasks/gsm8k/gsm8k.yaml and gsm8k-cot*.yaml (EleutherAI/lm-evaluation-harness, v3.0)
STRICT_HASHES = r"#### (\-?[0-9\.\,]+)"
STRICT_ANSWER_IS = r"The answer is (\-?[0-9\.\,]+)."
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")
IGNORED_ZEROSHOT = (*IGNORED, r"\.0+$")

_DIGITS = re.compile(r"\d+")
_GAPS = re.compile(r"[*%]")
_MARKUP = re.compile(r"\\\$|\$|\\(?:text|mathrm|mathbf|textbf)(?=\{)|\{,\}|\\[,;:! ]")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?![\d])")
_FRAC = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w.)\]])[-\u2212+])?)"
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<decimals>(?<=\d)\.\d+|(?<!\d)\.\d+)?"
    r"(?:\s*/\s*(?P<under>\d+(?:\.\d+)?))?"
)
_MARKERS = re.compile(r"####|\\boxed\b|\banswer(?:\s+is\b|\s*:)", re.IGNORECASE)


_MOST_DIGITS = 4000  # int() refuses more than 4300


@dataclass(frozen=True, slots=True)
class Reading:
    """What an extractor found."""

    text: str | None
    """As compared; None if there is no answer."""

    correct: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """How a recipe's own `strict` and exact match work."""

    strict: str = STRICT_HASHES
    ignored: tuple[str, ...] = IGNORED


def read_all(text: str, gold: str, rules: Rules) -> Mapping[str, Reading]:
    """Score one text with every extractor.

    Args:
        text: What the model wrote, cut at the stop strings.
        gold: The row's `answer`, as the data set has it.
        rules: The recipe's.
    """
    want = gold_value(gold)
    plain_gold = _ignore(gold, rules.ignored)
    strict, flexible = find_strict(text, rules.strict), find_flexible(text)
    digits = find_digits(text)
    boxed, signed = find_boxed(text), find_signed(text).value
    return {
        "strict": Reading(strict, _matches(strict, plain_gold, rules.ignored)),
        "flexible": Reading(flexible, _matches(flexible, plain_gold, rules.ignored)),
        "boxed": Reading(show(boxed), boxed is not None and boxed == want),
        "digits_only": Reading(
            None if digits is None else str(digits),
            digits is not None and digits == find_digits(gold),
        ),
        "signed_decimal": Reading(show(signed), signed is not None and signed == want),
    }


def gold_value(answer: str) -> Fraction | None:
    """The number a row's `answer` ends with; None if it has none."""
    return find_signed(answer.rpartition("####")[2]).value


def find_strict(text: str, pattern: str) -> str | None:
    """First match of the recipe's pattern."""
    match = re.search(pattern, text)
    return None if match is None else match[1].strip()


def find_flexible(text: str) -> str | None:
    """Last match of lm-eval's pattern, whatever it is."""
    last = None
    for match in _FLEXIBLE.finditer(text):
        last = match
    return None if last is None else last[0].strip()


def find_digits(text: str) -> int | None:
    """Last run of digits, commas removed first; a leading zero makes it no number (as there)."""
    found = _DIGITS.findall(text.replace(",", ""))
    last = found[-1] if found else ""
    if not last.isascii() or not 0 < len(last) <= _MOST_DIGITS or (last[0] == "0" and int(last)):
        return None
    return int(last)


def find_boxed(text: str) -> Fraction | None:
    r"""The number in the last \boxed{...}, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return find_signed(text[begin + 1 : at]).value
    return None


@dataclass(frozen=True, slots=True)
class Signed:
    """What `find_signed` read."""

    value: Fraction | None
    ambiguous: bool
    """Another number is on the same line, and no marker says which one is meant."""


def find_signed(text: str) -> Signed:
    """The number after the last marker, else the last number of the text."""
    marks = list(_MARKERS.finditer(text))
    for mark in reversed(marks):
        after = text[mark.end() :]
        found = _numbers(after.lstrip().split("\n", 1)[0])
        if found:
            return Signed(found[0], ambiguous=False)
    lines = [line for line in text.split("\n") if _has_number(line)]
    found = _numbers(lines[-1]) if lines else []
    if not found:
        return Signed(None, ambiguous=False)
    value = found[-1]
    return Signed(
        value, ambiguous=value is not None and len(set(found)) > 1 and "=" not in lines[-1]
    )


def show(value: Fraction | None) -> str | None:
    """A number as text: `18`, `-3.5`, `3/4`."""
    if value is None:
        return None
    if value.denominator == 1:
        return str(value.numerator)
    places = next((k for k in range(1, 13) if (value * 10**k).denominator == 1), 0)
    return f"{float(value):.{places}f}" if places else f"{value.numerator}/{value.denominator}"


def _has_number(line: str) -> bool:
    return any((c.isascii() and c.isdigit()) or _is_foreign(c) for c in line)


def _is_foreign(char: str) -> bool:
    """A digit or a fraction sign that is not read: half signs, Arabic digits."""
    if char.isascii():
        return False
    kind = unicodedata.category(char)
    return kind == "Nd" or (kind == "No" and not char.isdigit())


def _numbers(line: str) -> list[Fraction | None]:
    """Numbers of a line in order; None stands for one that cannot be read."""
    plain = _MARKUP.sub("", _GAPS.sub(" ", line))
    plain = _FRAC.sub(r" \1/\2 ", plain)
    plain = _SPACED.sub(lambda m: re.sub(r"\D", "", m[0]), plain)
    found: list[tuple[int, Fraction | None]] = [
        (m.start(), _value(m))
        for m in _NUMBER.finditer(plain)
        if m["whole"] is not None or m["decimals"] is not None
    ]
    foreign = [(at, None) for at, char in enumerate(plain) if _is_foreign(char)]
    return [value for _, value in sorted([*found, *foreign], key=lambda item: item[0])]


def _value(match: re.Match[str]) -> Fraction | None:
    digits = (match["whole"] or "0").replace(",", "") + (match["decimals"] or "")
    if len(digits) > _MOST_DIGITS:
        return None
    value = Fraction(digits)
    if match["under"] is not None:
        under = Fraction(match["under"])
        if under == 0:
            return None
        value /= under
    return -value if match["sign"] in ("-", "\u2212") else value


def _ignore(text: str, patterns: tuple[str, ...]) -> str:
    for pattern in patterns:
        text = re.sub(pattern, "", text)
    return text.lower()


def _matches(found: str | None, gold: str, patterns: tuple[str, ...]) -> bool:
    return found is not None and _ignore(found, patterns) == gold
