"""Every error a user can cause, each with what to do about it."""

from typing import Any


class DSparkError(Exception):
    """Base of all errors shown without a traceback.

    Args:
        message: What is wrong, naming the offending value and the bound.
        hint: One imperative sentence that would fix it, or "".
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(DSparkError):
    """A setting, alone or with another setting or a checkpoint, cannot be served."""

    exit_code = 2


class CheckpointError(DSparkError):
    """A checkpoint is unsupported, or weights are missing, left over, or of the wrong shape."""

    exit_code = 2


class CapacityError(DSparkError):
    """The device cannot hold what was asked of it."""


class RequestError(DSparkError):
    """One request cannot be served; the others go on.

    Args:
        kind: Machine-readable class: `empty`, `too_long`, `unsupported` or `schema`.
        message: As for DSparkError.
        hint: As for DSparkError.
    """

    exit_code = 3

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind


class ProcessError(DSparkError):
    """An error of another process.

    Args:
        message: What happened, and to whom.
        hint: As for DSparkError.
        exit_code: Of the error that it had.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON: what a ProcessError is made of."""
    if isinstance(error, DSparkError):
        return {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}
    return {"error": f"{type(error).__name__}: {error}", "hint": "", "exit_code": 1}
