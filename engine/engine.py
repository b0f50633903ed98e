"""The loop: admit, prefill, draft, verify, accept, commit."""

from collections.abc import Callable, Iterable, Iterator

from engine.config import EngineConfig
from engine.request import Completion, Request, RequestFailure
from engine.telemetry import EngineStats
from engine.text import Tokenizer


class Engine:
    """Runs requests to completion on one process."""

    config: EngineConfig
    tokenizer: Tokenizer
    stats: EngineStats
    max_model_len: int

    def __init__(
        self, config: EngineConfig, *, on_progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        """Load checkpoints and size KV memory.

        Args:
            config: The settings.
            on_progress: Called with (phase, done, total) while loading; bytes for `load`.
        """
        raise NotImplementedError

    def validate(self, request: Request) -> None:
        """Raise RequestError if `request` cannot be served; touches no state."""
        raise NotImplementedError

    def run(self, requests: Iterable[Request]) -> Iterator[Completion | RequestFailure]:
        """Yield each request as it finishes; pulls from `requests` only as rows free up.

        Closing the iterator early drops what is unfinished and leaves the engine usable.
        """
        raise NotImplementedError
