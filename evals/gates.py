"""`--gate`: bars that turn a measurement into an exit code, as `acc>=0.87` or `mcnemar>0.05`."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from evals.numbers import rounded

EXIT_CODE = 4

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_GATE = re.compile(r"\s*([a-z_0-9]+)\s*(>=|<=|==|>|<)\s*([-+0-9.eE]+)(\s*%)?\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """One bar."""

    text: str
    name: str
    sign: str
    bound: float

    def check(self, values: Mapping[str, float | None]) -> dict[str, Any]:
        """Hold it against what was measured; a value that is missing does not pass."""
        value = values.get(self.name)
        passed = value is not None and _OPERATORS[self.sign](value, self.bound)
        return {"gate": self.text, "value": rounded(value), "passed": passed}


def parse_gates(texts: Sequence[str], names: Mapping[str, str]) -> list[Gate]:
    """Understand `--gate` before anything runs.

    Args:
        texts: Each one bar, or several with commas between them.
        names: What may be gated in this run -> what it is.

    Raises:
        ConfigError: One is not a bar, or names nothing that will be measured.
    """
    known = ", ".join(names)
    gates = []
    for part in (piece for text in texts for piece in text.split(",")):
        match = _GATE.fullmatch(part)
        try:
            bound = float(match[3]) / (100 if match[4] else 1) if match else None
        except ValueError:
            bound = None
        if match is None or bound is None:
            raise ConfigError(
                f"--gate {part.strip()!r} is not a bar",
                f"write one as 'acc>=0.87'; names here: {known}",
            )
        if match[1] not in names:
            raise ConfigError(
                f"--gate: this run does not measure {match[1]!r}", f"names here: {known}"
            )
        gates.append(Gate(part.strip(), match[1], match[2], bound))
    return gates
