"""What a run does about a step that does not fit into memory: everybody waits, steps get smaller.

Tokens that were committed stay, and their KV is computed again. Noise is keyed by position, so what
comes out is what would have come out anyway.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.errors import CapacityError
from engine.scheduler import Scheduler
from engine.telemetry import EngineStats


@dataclass(frozen=True, slots=True)
class Shortage:
    """A step that ran out of memory."""

    kind: str
    """`prefill` or `round`."""

    request_ids: list[str]
    """Who was in it, oldest first."""

    reason: str
    """The first line of the error."""

    slots: int
    """Requests that the step had room for: a round may be padded to what the batch will be."""


@dataclass(slots=True)
class Shrinking:
    """Halves the scheduler's sizes until steps fit; they do not grow back in this run."""

    scheduler: Scheduler
    stats: EngineStats
    allowed: bool = True
    """False where a smaller step would not be the one that was asked for."""

    failure: CapacityError | None = None
    """Why no step can be made any more; results of earlier ones go out first."""

    _stuck: set[str] = field(default_factory=set)
    """Kinds of steps of which the smallest did not fit, with nothing of that kind done since."""

    def __post_init__(self) -> None:
        """Show the sizes."""
        self._show()

    def reset(self) -> None:
        """Nothing is running: another run may try."""
        self.failure = None
        self._stuck.clear()

    def fits(self, kind: str) -> None:
        """A step of this kind was launched."""
        self._stuck.discard(kind)

    def after(self, shortage: Shortage, release: Callable[[], None]) -> None:
        """Let all wait, free what can be, and make steps smaller, or set `failure`.

        Args:
            shortage: What did not fit; results of all steps before it have been taken in.
            release: Gives memory back that is not needed to go on.
        """
        running = len(self.scheduler.running)
        self.scheduler.preempt_all()
        release()
        self.stats.out_of_memory += 1
        if not self.allowed:
            self.failure = CapacityError(
                f"a {shortage.kind} of {len(shortage.request_ids)} requests does not fit into "
                f"memory: {shortage.reason}",
                hint="use fewer requests, or a smaller --gpu-memory-utilization",
            )
        elif not self._halve(shortage, running):
            if shortage.kind in self._stuck:
                self.failure = self._alone(shortage)
            self._stuck.add(shortage.kind)  # what was freed just now may be enough
        self._show()

    def _halve(self, shortage: Shortage, running: int) -> bool:
        """Make steps of this kind smaller; False if they are as small as they get."""
        scheduler, least = self.scheduler, self.scheduler.kv_block_size
        if shortage.kind == "prefill" and scheduler.max_num_batched_tokens > least:
            half = scheduler.max_num_batched_tokens // 2
            scheduler.max_num_batched_tokens = max(half, least)
            return True
        most = min(scheduler.max_num_seqs, max(running, shortage.slots))
        if most <= 1:
            return False
        scheduler.max_num_seqs = most // 2
        return True

    def _alone(self, shortage: Shortage) -> CapacityError:
        return CapacityError(
            f"request {shortage.request_ids[0]!r} does not fit into memory even alone: its "
            f"{shortage.kind} ran out of it twice: {shortage.reason}",
            hint="use a smaller --gpu-memory-utilization, which leaves more beside the KV cache, "
            "or a smaller --max-model-len; finished rows are kept",
        )

    def _show(self) -> None:
        self.stats.max_num_seqs = self.scheduler.max_num_seqs
        self.stats.max_num_batched_tokens = self.scheduler.max_num_batched_tokens
