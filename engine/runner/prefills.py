"""CUDA graphs of short prefills, whose launches take the host longer than the device.

A newcomer's prompt of 100 tokens keeps a GPU busy for less than the host needs to launch its
layers one by one, and everybody else waits meanwhile. Such prefills are padded to few sizes of
tokens and of requests, and captured once a size has come up often enough. A graph reads all it
needs from one buffer, and also samples the first tokens and places the rows.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import torch

from engine.runner.batch import Members, Needs
from engine.runner.steps import Prompt, Steps, query_bound
from engine.scheduler import Chunk
from engine.sequence import Sequence

T = TypeVar("T")

_TOKENS = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes: from 64 on padding is a third at most."""

_REQUESTS = (4, 16, 64)
_USES = 4
"""Prefills of a size from which it is captured, which costs about as much as so many of them."""

_HOST_BOUND = 1 << 32
"""Tokens times squared width of a layer up to which launching a layer (some 0.2 ms) takes longer
than its 12 H^2 weights take to multiply (at some 500 TFLOP/s)."""


class Size(NamedTuple):
    """Of a captured prefill."""

    tokens: int  # T
    requests: int  # R


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a graph reads: parts of one buffer, so that one copy fills them all."""

    whole: torch.Tensor  # int64, all of the following side by side
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    ends: torch.Tensor  # [R+1], prefix sums of tokens
    seq_lens: torch.Tensor  # [R], KV tokens after this chunk
    rows: torch.Tensor  # [R], whose chunk
    last: torch.Tensor  # [R], its last token's place
    started: torch.Tensor  # [R], the row to put before its first round; the spare one: none
    lengths: torch.Tensor  # [R], prompt tokens

    @classmethod
    def on(cls, size: Size, device: torch.device) -> "_Inputs":
        tokens, requests = size
        parts = (tokens, tokens, requests + 1, *[requests] * 5)
        whole = torch.zeros(sum(parts), dtype=torch.int64, device=device)
        return cls(whole, *whole.split(parts))


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    """A captured prefill, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    inputs: _Inputs
    logits: torch.Tensor  # [1, V], of this rank's first request
    result: torch.Tensor  # [R, 2], as `Steps.first_tokens` has it


class Recorder(Protocol):
    """What captures; see `engine.runner.graphs.Graphs`."""

    def record(self, body: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what `body` launches, and where it leaves its results."""

    def present(self, index: torch.Tensor) -> Items[Sequence]:
        """Who will be at `index` in a replay."""


class Prefills:
    """Captured prefills of one process."""

    def __init__(self, steps: Steps, graphs: Recorder) -> None:
        """Prepare; nothing is captured yet.

        Args:
            steps: The device side.
            graphs: Records, into the memory that all captured steps share.
        """
        self._steps, self._graphs = steps, graphs
        self._found: dict[tuple[Size, Needs], PrefillGraph] = {}
        self._uses: Counter[tuple[Size, Needs]] = Counter()
        width = steps.net.target.spec.layers.hidden_size
        self.most_tokens = min(_TOKENS[-1], _HOST_BOUND * steps.net.ranks.size // width**2)
        """Longer ones keep the device busy while they are launched."""

    @property
    def most(self) -> int:
        """Prefills that may ever be captured for one kind of sampling."""
        if self._steps.net.num_owners > 1:
            return 0
        sizes = sum(n <= self.most_tokens for n in _TOKENS) + (self.most_tokens not in _TOKENS)
        return sizes * len(_REQUESTS)

    @property
    def count(self) -> int:
        """Prefills captured so far."""
        return len(self._found)

    def clear(self) -> None:
        """Forget all captured prefills."""
        self._found.clear()
        self._uses.clear()

    def find(self, chunks: Items[Chunk], needs: Needs) -> PrefillGraph | None:
        """A graph of these chunks; None: launch them one by one. May capture."""
        size = self._size(sum(c.count for c in chunks), len(chunks))
        if size is None:
            return None
        key = size, needs
        self._uses[key] += 1
        if key not in self._found and self._uses[key] >= _USES:
            self._found[key] = self._capture(size, needs)
        return self._found.get(key)

    def _size(self, tokens: int, requests: int) -> Size | None:
        if self._steps.net.num_owners > 1 or tokens > self.most_tokens:
            return None
        slots = next((n for n in _REQUESTS if n >= requests), None)
        if slots is None:
            return None
        return Size(next(n for n in _TOKENS if n >= tokens), slots)

    def load(self, captured: PrefillGraph, chunks: Items[Chunk]) -> None:
        """Say what to compute: chunks that end a fresh prompt come first."""
        spare, counts = self._steps.rows.spare, [c.count for c in chunks]
        tokens, slots = len(captured.inputs.token_ids), len(captured.inputs.rows)
        ends = list(accumulate(counts))
        fresh = [c.sequence for c in chunks if c.samples]

        def padded(values: list[int], length: int, padding: int) -> list[int]:
            return values + [padding] * (length - len(values))

        ids, positions = list[int](), list[int]()
        for c in chunks:
            ids += c.sequence.token_ids[c.start : c.start + c.count]
            positions += range(c.start, c.start + c.count)
        values = [
            *padded(ids, tokens, 0),
            *padded(positions, tokens, 0),
            *padded([0, *ends], slots + 1, ends[-1]),
            *padded([c.start + c.count for c in chunks], slots, 0),
            *padded([c.sequence.row for c in chunks], slots, spare),
            *padded([end - 1 for end in ends], slots, 0),
            *padded([s.row for s in fresh], slots, spare),
            *padded([s.num_prompt for s in fresh], slots, 0),
        ]
        self._steps.rows.uploads.send_integers(values, captured.inputs.whole)

    def _capture(self, size: Size, needs: Needs) -> PrefillGraph:
        steps, device = self._steps, self._steps.rows.device
        inputs = _Inputs.on(size, device)
        inputs.rows.fill_(steps.rows.spare)  # nothing but padding
        inputs.started.fill_(steps.rows.spare)
        members = Members(inputs.rows, self._graphs.present(inputs.rows))

        def prefill() -> tuple[torch.Tensor, torch.Tensor]:
            prompt = Prompt(
                inputs.token_ids,
                inputs.positions,
                inputs.ends.int(),
                inputs.seq_lens.int(),
                query_bound(size.tokens),
                size.tokens,
            )
            hidden = steps.prefill(members, prompt)
            logits, result = steps.first_tokens(
                inputs.started,
                hidden[inputs.last],
                inputs.lengths,
                sampled=needs.sampled,
                filtered=needs.filtered,
            )
            steps.rows.place(inputs.started, inputs.lengths, result[:, 1])
            return logits[:1].clone(), result  # the others' would be kept as well

        graph, (logits, result) = self._graphs.record(prefill)
        return PrefillGraph(graph, inputs, logits, result)
