"""A request on its way: tokens so far, where its KV is, and when it ends."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from engine.kv.blocks import ROOT, chain_digest
from engine.request import FinishReason, Request, Round
from engine.text import StopMatcher


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ended."""

    reason: FinishReason
    stop_reason: str | int | None
    text_end: int | None
    """Characters of the decoded output to keep; None = all."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one request; equal to itself alone.

    `num_computed` tokens have KV in target and draft caches, or will have before the next step
    reads them. It decodes when all but the last token, the anchor, are computed; a sequence without
    output computes its whole prompt, and its anchor may be known to the device only.
    """

    request: Request
    matcher: StopMatcher | None = None
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    """Prompt tokens."""

    num_computed: int = 0
    decoding: bool = False
    """Has it an anchor, and KV for everything before it? Kept by the scheduler."""

    row: int = -1
    epoch: int = 0
    """Preemptions so far: results of steps launched in an earlier epoch are void."""

    generation: int = -1
    """Which binding of a row to a request this is: counts admissions, so it never repeats."""

    ended: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    """Leading blocks offered to the prefix cache."""

    digests: list[bytes] = field(default_factory=list)
    num_cached_tokens: int | None = None
    rounds: list[Round] = field(default_factory=list)
    admitted: float | None = None
    """Clock time of the first admission."""

    commits: list[tuple[float, int]] = field(default_factory=list)
    """(clock time, tokens kept) of each step that gave it tokens."""

    _ends: frozenset[int] | None = None
    """Tokens that end it, once it has been given any."""

    _longest: int = 0
    """Tokens at which it ends, prompt included; the same."""

    def __post_init__(self) -> None:
        """Start from the prompt."""
        self.token_ids = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def prefill_end(self) -> int:
        """Tokens to compute before decoding: the prompt, or all but the anchor after preemption."""
        num_tokens = len(self.token_ids)
        return num_tokens if num_tokens == self.num_prompt else num_tokens - 1

    def full_digests(self, num_tokens: int, kv_block_size: int) -> list[bytes]:
        """Digests of the blocks that the first `num_tokens` tokens fill."""
        count = num_tokens // kv_block_size
        while len(self.digests) < count:
            begin = len(self.digests) * kv_block_size
            parent = self.digests[-1] if self.digests else ROOT
            self.digests.append(chain_digest(parent, self.token_ids[begin : begin + kv_block_size]))
        return self.digests[:count]

    def commit(
        self, tokens: Tokens[int], eos_token_ids: frozenset[int], max_model_len: int
    ) -> tuple[int, End | None]:
        """Append tokens up to the first event that ends the sequence.

        The earliest token wins. Of events at one token the first of these counts: stop string,
        EOS or stop token, max_tokens, context.

        Returns:
            How many tokens were kept, and the end, if one came.
        """
        if self._ends is None:
            params = self.request.params
            self._longest = min(self.num_prompt + params.max_tokens, max_model_len)
            self._ends = frozenset(params.stop_token_ids) | (
                frozenset() if params.ignore_eos else eos_token_ids
            )
        room = self._longest - len(self.token_ids)  # >= 1 while it runs
        if self.matcher is None and len(tokens) < room and self._ends.isdisjoint(tokens):
            self.token_ids += tokens
            return len(tokens), None
        for kept, token in enumerate(tokens, start=1):
            self.token_ids.append(token)
            match = self.matcher.push(token) if self.matcher is not None else None
            if match is not None:
                return kept, End(FinishReason.STOP, match.stop, match.text_end)
            if token in self._ends:
                return kept, End(FinishReason.STOP, token, None)
            if kept >= room:
                return kept, End(FinishReason.LENGTH, None, None)
        return len(tokens), None
