"""`--compare-plain`: the same rows without the drafter, in the same process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.request import Completion

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speeds over the same rows; loading is not counted."""

    rows: int
    drafted_tokens_per_second: float
    plain_tokens_per_second: float
    equal_outputs: int
    greedy_rows: int

    @property
    def speedup(self) -> float:
        """Drafted over plain."""
        return self.drafted_tokens_per_second / max(self.plain_tokens_per_second, 1e-9)

    def lines(self) -> list[str]:
        """For people."""
        equal = f"{self.equal_outputs} of {self.rows} outputs are equal"
        if self.greedy_rows < self.rows:
            equal += f" ({self.rows - self.greedy_rows} were sampled, and need not be)"
        return [
            f"with drafter {self.drafted_tokens_per_second:9.1f} tokens/s",
            f"plain        {self.plain_tokens_per_second:9.1f} tokens/s",
            f"speed-up     {self.speedup:9.2f} x; {equal}",
        ]


def compare_plain(
    results: list[Completion],
    seconds: float,
    config: EngineConfig,
    load: Callable[[EngineConfig], "Engine"],
) -> Comparison:
    """Decode the rows of `results` plainly.

    Args:
        results: What the drafted run gave.
        seconds: How long it took.
        config: Its settings.
        load: Makes an engine.

    Returns:
        Both speeds, and how many outputs agree token for token.
    """
    engine = load(config.without_draft())
    drafted = {_name(result): result for result in results}
    started = time.perf_counter()
    equal = tokens = 0
    for result in engine.run(iter([result.request for result in results])):
        if isinstance(result, Completion):
            tokens += len(result.token_ids)
            equal += result.token_ids == drafted[_name(result)].token_ids
    plain_seconds = time.perf_counter() - started
    drafted_tokens = sum(len(result.token_ids) for result in results)
    return Comparison(
        rows=len(results),
        drafted_tokens_per_second=drafted_tokens / max(seconds, 1e-9),
        plain_tokens_per_second=tokens / max(plain_seconds, 1e-9),
        equal_outputs=equal,
        greedy_rows=sum(result.request.params.temperature == 0 for result in results),
    )


def _name(result: Completion) -> tuple[str, int]:
    return result.request.request_id, result.request.sample_index
