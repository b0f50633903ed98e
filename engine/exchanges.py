"""What a round's exchanges cost: the numbers behind `dspark bench collectives`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch

from engine.checkpoints import plan_checkpoints
from engine.config import EngineConfig
from engine.dist.collectives import Collectives
from engine.dist.connect import lead
from engine.dist.group import Group
from engine.dist.mapped import SIZES, Mapped
from engine.dist.timing import milliseconds
from engine.dist.torchrun import launched, resolve_size
from engine.errors import ConfigError
from engine.models.deepseek_v4_spec import V4TargetSpec
from engine.placing import placement

_TOLD = 400  # messages: enough for a 99th percentile


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of a batch size."""

    name: str
    num_reqs: int
    shape: str
    """What each rank gives."""

    num_bytes: int
    """What each rank receives from the others at least."""

    microseconds: float
    note: str = ""

    @property
    def gigabytes_per_second(self) -> float:
        """Received bytes over time."""
        return self.num_bytes / self.microseconds / 1e3


@dataclass(frozen=True, slots=True)
class Shapes:
    """What decides the sizes."""

    hidden_size: int
    vocab_size: int
    gamma: int
    dtype: str
    device: str
    requests: tuple[int, ...]
    has_owners: bool = False
    """Can ranks hold tokens of their own, which go to experts and back?"""


def measure_exchanges(config: EngineConfig, requests: list[int]) -> tuple[str, list[Exchange]]:
    """Bring up ranks, time the exchanges of a model's rounds, send the ranks away.

    Args:
        config: The model, its draft, the number of ranks; only shapes are read.
        requests: Batch sizes.

    Returns:
        What made the exchanges, and their times on rank 0.

    Raises:
        ConfigError: There is one rank only.
    """
    size = resolve_size(config.tensor_parallel_size, launched())
    if size == 1:
        raise ConfigError("one rank exchanges nothing", "give -tp 2 or more, or use torchrun")
    plan, _ = plan_checkpoints(config)
    at = placement(config, plan.target)
    shapes = Shapes(
        hidden_size=plan.target.layers.hidden_size,
        vocab_size=plan.target.vocab_size,
        gamma=plan.num_speculative_tokens or 1,
        dtype=at.settings["dtype"],
        device=at.device.type,
        requests=tuple(requests),
        has_owners=isinstance(plan.target, V4TargetSpec),
    )
    group = lead(size, at.device, config.all_reduce)
    try:
        group.tell({"exchanges": {name: getattr(shapes, name) for name in Shapes.__slots__}})
        return group.ranks.name, play(group, shapes)
    finally:
        group.close()


def follow_exchanges(group: Group, told: dict[str, Any]) -> None:
    """Take part, on another rank, until rank 0 is done."""
    play(group, Shapes(**{**told, "requests": tuple(told["requests"])}))
    group.tell(None)


@torch.inference_mode()
def play(group: Group, shapes: Shapes) -> list[Exchange]:
    """Make every exchange on every rank; the times are this rank's."""
    device = torch.device(shapes.device)
    with group.step():
        return [
            *(found for n in shapes.requests for found in _of_batch(group, shapes, n, device)),
            _messages(group),
        ]


def _of_batch(
    group: Group, shapes: Shapes, num_reqs: int, device: torch.device
) -> Iterator[Exchange]:
    ranks, dtype = group.ranks, getattr(torch, shapes.dtype)
    owned, width = -(-num_reqs // ranks.size), -(-shapes.vocab_size // ranks.size)
    others = ranks.size - 1

    def exchange(name: str, x: torch.Tensor, received: int, body: Callable[[], object]) -> Exchange:
        calls = 10 if device.type == "cuda" else 1
        spent = milliseconds(body, device, calls=calls) * 1e3
        shape = " x ".join(map(str, x.shape))
        return Exchange(name, num_reqs, shape, received * x.element_size(), spent)

    base = torch.zeros(num_reqs * shapes.gamma, width, dtype=dtype, device=device)
    yield exchange(
        "base logits, all-gather", base, others * base.numel(), lambda: ranks.all_gather(base)
    )
    dealt = torch.zeros(ranks.size * owned * shapes.gamma, width, dtype=dtype, device=device)
    out = torch.empty_like(dealt)
    yield exchange(
        "base logits, all-to-all",
        dealt,
        others * dealt.numel() // ranks.size,
        lambda: ranks.all_to_all_single(out, dealt),
    )
    drafts = torch.zeros(owned, 2 * shapes.gamma, dtype=torch.int32, device=device)
    yield exchange(
        "drafts, all-gather", drafts, others * drafts.numel(), lambda: ranks.all_gather(drafts)
    )
    rows = num_reqs * (shapes.gamma + 1)
    hidden = torch.zeros(rows, shapes.hidden_size, dtype=dtype, device=device)
    moved = 2 * others * hidden.numel() // ranks.size
    yield exchange("hidden, all-reduce", hidden, moved, lambda: ranks.all_reduce(hidden))
    if shapes.has_owners:
        own = hidden[: -(-rows // ranks.size)].clone()
        parts, sums = own.repeat(ranks.size, 1), own.repeat(ranks.size, 1)
        moved = others * own.numel()
        yield exchange("own tokens, all-gather", own, moved, lambda: ranks.all_gather(own))
        yield exchange(
            "experts' parts, all-to-all",
            parts,
            moved,
            lambda: ranks.all_to_all_single(sums, parts),
        )
        return
    for way, body, received in _sums(ranks, hidden):
        yield exchange(f"hidden, sum and norm, {way}", hidden, received, body)


def _sums(
    ranks: Collectives, hidden: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Every way there is to sum `hidden`, add it to a stream and norm that; values received."""
    others = ranks.size - 1
    weight = hidden[0].clone()
    if not isinstance(ranks, Mapped) or hidden.numel() * hidden.element_size() > SIZES[-1]:
        moved = 2 * others * hidden.numel() // ranks.size
        yield ranks.name, lambda: ranks.add_rms_norm(hidden, hidden, weight, 1e-6, 0), moved
        return
    for way, body in ranks.ways(hidden.shape[0], hidden.shape[1], hidden.dtype).items():
        yield way, body, others * hidden.numel()


def _messages(group: Group) -> Exchange:
    """A scalar that rank 0 tells the others, host to host."""
    spent = []
    for turn in range(_TOLD):
        begin = time.perf_counter()
        group.tell(turn)
        spent.append((time.perf_counter() - begin) * 1e6)
    last = quantiles(spent, n=100)[-1]
    return Exchange("a number from rank 0, host", 0, "1", 8, median(spent), f"p99 {last:.0f} us")
