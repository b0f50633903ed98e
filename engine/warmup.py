"""How much of a device is left for KV: steps of the largest sizes are run, and what they took.

They run before there is a KV cache, over one scratch block that every token is stored in: the
values mean nothing, the memory and the kernels are those of the run.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from engine.config import EngineConfig
from engine.dist.group import Group
from engine.errors import CapacityError
from engine.kernels.tile_linear import MOST_TILED_ROWS
from engine.models.decoder import Decoder
from engine.request import Request, SamplingParams
from engine.runner.model_runner import ModelRunner
from engine.runner.out_of_memory import first_line, is_out_of_memory, release_caches
from engine.runner.rows import Rows
from engine.runner.steps import Networks
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.spec.plan import Plan
from engine.spec.tiers import graph_tiers

CUDA_SEQS, CUDA_PREFILL = 256, 8192
"""Requests at once and prompt tokens a step on a CUDA device, unless asked otherwise."""

_GREEDY = SamplingParams()
_HOT = SamplingParams(temperature=1.0, top_p=0.9)

_SHORT = 16
"""Tokens of a prompt that leaves most of a device idle."""


class Memory(Protocol):
    """A device's memory, in bytes."""

    total: int

    def release(self) -> None:
        """Give back what is kept for later."""

    def reserved(self) -> int:
        """Held by this process's allocator now."""

    def peak(self) -> int:
        """The most that was held since `watch`."""

    def watch(self) -> None:
        """Begin a new peak."""

    def outside(self) -> int:
        """In use, but not by this process's allocator: contexts, graphs, other programs."""


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def release(self) -> None:
        """As Memory."""
        release_caches(self._device)

    def reserved(self) -> int:
        """As Memory."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """As Memory."""
        return torch.cuda.max_memory_reserved(self._device)

    def watch(self) -> None:
        """As Memory."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def outside(self) -> int:
        """As Memory."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - self.reserved()


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    lookahead: int
    kv_block_size: int


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Where a device's bytes go, KV aside."""

    total: int
    weights: int
    steps: int
    """Activations, sampling and the memory of captured rounds, at their peak."""

    graphs: int
    """What the driver takes for a round captured at every batch size."""

    outside: int
    """Contexts, kernels and other programs."""

    graph_pool: int
    """Of `steps`: what captured rounds share."""

    def left(self, utilization: float) -> int:
        """Bytes for KV when `utilization` of the device may be used; negative if there are none."""
        used = self.weights + self.steps + self.graphs + self.outside
        return int(self.total * utilization) - used

    def account(self, utilization: float) -> str:
        """The sum in words."""
        parts = {
            "weights": self.weights,
            "the largest prefill and round": self.steps,
            "graphs": self.graphs,
            "context and other programs": self.outside,
        }
        listed = ", ".join(f"{gib(size)} {name}" for name, size in parts.items())
        return f"{gib(self.total)} x --gpu-memory-utilization {utilization:g} less {listed}"


@dataclass(frozen=True, slots=True)
class Room:
    """Device memory for KV, and how it came about."""

    kv_bytes: int
    account: str = ""
    graph_pool_bytes: int = 0


def gib(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / (1 << 30):.2f} GiB"


def measure_room(
    config: EngineConfig,
    scratch: Networks,
    device: torch.device,
    max_model_len: int,
    lookahead: int,
    least: int,
    group: Group,
) -> tuple[EngineConfig, Room]:
    """What a warm-up leaves of a CUDA device for KV: the least of all ranks.

    Args:
        config: The settings.
        scratch: The networks, with caches of one KV block.
        device: Where they are.
        max_model_len: Tokens of the longest request.
        lookahead: As the scheduler's.
        least: Bytes of KV below which nothing runs.
        group: The ranks that warm up together.

    Returns:
        The settings, with the sizes that were measured, and the room.

    Raises:
        CapacityError: Less is left at the sizes asked for, or at the smallest ones.
    """
    memory = CudaMemory(device)

    def measure(config: EngineConfig) -> MemoryUse:
        sizes = Sizes(
            max_num_seqs=config.max_num_seqs or CUDA_SEQS,
            max_num_batched_tokens=config.max_num_batched_tokens or CUDA_PREFILL,
            max_model_len=max_model_len,
            lookahead=lookahead,
            kv_block_size=config.kv_block_size,
        )
        return warm_up(scratch, sizes, device, memory, use_graphs=not config.enforce_eager)

    return shrink_to_fit(config, measure, memory.release, least, group)


def shrink_to_fit(
    config: EngineConfig,
    measure: Callable[[EngineConfig], MemoryUse],
    release: Callable[[], None],
    least: int,
    group: Group,
) -> tuple[EngineConfig, Room]:
    """Measure at the sizes asked for; sizes that were not are halved while too little is left.

    Args:
        config: The settings.
        measure: Runs the largest steps of given settings.
        release: Gives back what a failed measurement left.
        least: Bytes of KV below which nothing runs.
        group: The ranks that measure together. If one of several runs out of memory, the others
            are left in the middle of a step: that is an error.
    """
    sizes: dict[str, Any] = {
        "max_num_seqs": CUDA_SEQS,
        "max_num_batched_tokens": CUDA_PREFILL,
    }
    unset = [name for name in sizes if getattr(config, name) is None]
    config = replace(config, **{name: sizes[name] for name in unset})
    share = config.gpu_memory_utilization
    while True:
        try:
            use = measure(config)
            left, why = group.least(use.left(share)), use.account(share)
            if left >= least:
                return config, Room(left, why, use.graph_pool)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if group.size > 1:
                raise CapacityError(
                    f"the largest prefill and round do not fit: {first_line(error)}",
                    hint="use a smaller --max-num-seqs or --max-num-batched-tokens",
                ) from error
            left, why = 0, f"the largest prefill and round do not fit: {first_line(error)}"
        release()
        smaller = {n: getattr(config, n) // 2 for n in unset if getattr(config, n) > 1}
        if not smaller:
            raise CapacityError(
                f"{gib(max(left, 0))} are left for KV with --max-num-seqs {config.max_num_seqs} "
                f"and --max-num-batched-tokens {config.max_num_batched_tokens}, at least "
                f"{gib(least)} are needed: {why}",
                hint="use a smaller --max-num-seqs or --max-model-len, or a larger "
                "--gpu-memory-utilization",
            )
        config = replace(config, **smaller)


@torch.inference_mode()
def warm_up(
    networks: Networks, sizes: Sizes, device: torch.device, memory: Memory, *, use_graphs: bool
) -> MemoryUse:
    """Run the largest steps once, greedy and sampled, and account for the memory they take.

    Args:
        networks: With caches of at least one KV block.
        sizes: The largest prefill and batch.
        device: Where they run.
        memory: Of that device.
        use_graphs: Are rounds captured?

    Raises:
        torch.OutOfMemoryError: The largest steps do not fit beside the weights.
    """
    memory.release()
    weights = memory.reserved()
    steps = _Warmup(networks, sizes, device, memory, use_graphs)
    for params in (_GREEDY, _HOT):
        steps.prefill(params)
        steps.round(params, sizes.max_num_seqs)
    steps.prefill(_HOT)  # beside what captured rounds keep
    pool = steps.settled() - steps.base
    for tokens in (_SHORT, *_tiled_rows(networks)):
        steps.newcomer(_GREEDY, tokens)
    before = memory.outside()
    steps.round(_GREEDY, 1)
    each = max(memory.outside() - before, 0)
    peak = max(steps.peak, steps.settled())
    captures = len(graph_tiers(sizes.max_num_seqs)) + steps.most_prefills
    del steps
    memory.release()
    return MemoryUse(
        total=memory.total,
        weights=weights,
        steps=peak - weights,
        graphs=each * captures if use_graphs else 0,
        outside=memory.outside(),
        graph_pool=pool if use_graphs else 0,
    )


def _tiled_rows(networks: Networks) -> list[int]:
    """Row counts whose products are kernels of ours that no other step here has built."""
    target = networks.target
    tiled = isinstance(target, Decoder) and any(m.tiled for m in target.layers[0].products)
    return [64, MOST_TILED_ROWS] if tiled else []


class _Warmup:
    """A runner of steps that mean nothing, and the most memory they held."""

    def __init__(
        self,
        networks: Networks,
        sizes: Sizes,
        device: torch.device,
        memory: Memory,
        use_graphs: bool,
    ) -> None:
        width = -(-(sizes.max_model_len + sizes.lookahead) // sizes.kv_block_size)
        rows = Rows(sizes.max_num_seqs, width, device)
        self._runner = ModelRunner(networks, rows, {}, use_graphs=use_graphs)
        self._sizes = sizes
        self._memory = memory
        self.peak = 0
        self.base = memory.reserved()
        """Held before the first step."""

    def prefill(self, params: SamplingParams) -> None:
        """The most prompt tokens of a step, over as many prompts as may start together."""
        budget, longest = self._sizes.max_num_batched_tokens, self._sizes.max_model_len - 1
        count = min(self._sizes.max_num_seqs, budget)
        lengths = [min(budget // count + (i < budget % count), longest) for i in range(count)]
        self._prefill(params, [max(n, 1) for n in lengths])

    def newcomer(self, params: SamplingParams, tokens: int) -> None:
        """One short prompt: its attention is another kernel, split over what it sees."""
        self._prefill(params, [max(min(tokens, self._sizes.max_model_len - 1), 1)])

    def _prefill(self, params: SamplingParams, lengths: Items[int]) -> None:
        sequences = self._sequences(params, lengths)
        self._watch()
        self._runner.start(sequences)
        chunks = [Chunk(s, 0, s.num_prompt, admitted=True) for s in sequences]
        self._runner.prefill(chunks).wait()
        self._note()

    def round(self, params: SamplingParams, num_reqs: int) -> None:
        """A round of `num_reqs` requests."""
        sequences = self._sequences(params, [1] * num_reqs)
        self._watch()
        self._runner.start(sequences)
        start = torch.zeros(num_reqs, dtype=torch.int64, device=self._runner.rows.device)
        self._runner.rows.place(start + torch.arange(num_reqs, device=start.device), start, start)
        width = self._runner.net.num_speculative_tokens + 1
        path: Literal["full", "plain"] = "full" if width > 1 else "plain"
        self._runner.round(sequences, Plan(path, None, num_reqs, num_reqs * width)).wait()
        self._note()

    @property
    def most_prefills(self) -> int:
        """Prefills that may be captured."""
        graphs = self._runner.graphs
        return 0 if graphs is None else graphs.prefills.most

    def settled(self) -> int:
        """Bytes that stay."""
        self._memory.release()
        return self._memory.reserved()

    def _watch(self) -> None:
        # what one kind of step keeps for later is given back when another needs it
        self._memory.release()
        self._memory.watch()

    def _note(self) -> None:
        self.peak = max(self.peak, self._memory.peak())

    def _sequences(self, params: SamplingParams, lengths: Items[int]) -> list[Sequence]:
        """Requests in rows 0, 1, ..., whose tokens all lie in KV block 0."""
        size, lookahead = self._sizes.kv_block_size, self._sizes.lookahead
        made = []
        for row, length in enumerate(lengths):
            request = Request(
                request_id=f"warm-up {row}", prompt_token_ids=(0,) * length, params=params
            )
            sequence = Sequence(request, row=row)
            sequence.block_ids = [0] * -(-(length + lookahead) // size)
            made.append(sequence)
        return made
