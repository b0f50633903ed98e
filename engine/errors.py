"""Every error a user can cause, each with what to do about it."""


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
