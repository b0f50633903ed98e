"""Counters and timers of one engine; host data only."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made. Tokens are counted after cutting at the sequence end."""

    prompt_tokens: int = 0
    """Prompt tokens admitted, cached ones included."""

    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""

    output_tokens: int = 0
    """Tokens kept, of finished and running requests."""

    rounds: int = 0
    """Request-rounds with a draft: one per request per draft-verify-accept round."""

    drafted: int = 0
    """Draft tokens the target checked."""

    accepted: int = 0
    """Draft tokens kept."""

    committed: int = 0
    """Tokens kept in those rounds, bonus tokens included."""

    drafted_at: list[int] = field(default_factory=list)
    """Per draft position: how often the target checked it."""

    accepted_at: list[int] = field(default_factory=list)
    """Per draft position: how often it was kept."""

    preemptions: int = 0
    out_of_memory: int = 0
    """Steps that did not fit; each made those after it smaller."""

    max_num_seqs: int = 0
    """Requests at once, as it is now."""

    max_num_batched_tokens: int = 0
    """Prompt tokens a step, as it is now."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: load, warm-up, capture, prefill, draft, verify, wait, host."""

    until_first_token: dict[str, float] = field(default_factory=dict)
    """Wall time from the engine's beginning to its first output token: load, warm-up, capture, and
    the rest. Empty before that token."""

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per request-round, bonus included; 0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0
