"""Small arithmetic that reports share."""

from engine.errors import DSparkError


class IdentityError(DSparkError):
    """Two numbers that must agree do not: a bug in what counts, never in what was measured."""


def ratio(over: float, under: float) -> float | None:
    """A quotient; None where there is nothing to divide by."""
    return over / under if under else None


def rounded(value: float | None) -> float | None:
    """Six significant digits, for files."""
    return None if value is None else float(f"{value:.6g}")


def require(holds: bool, what: str) -> None:
    """Raise IdentityError unless `holds`."""
    if not holds:
        raise IdentityError(f"the numbers do not add up: {what}", "report this with the command")
