"""What the end of a sharded drafter costs in either order: the numbers behind `bench collapse`.

The tail is the last sublayer's way back into the streams, the collapse, and the exchange of
`engine.models.draft_tail`. Both orders are made over the same tensors, outputs compared bit for
bit with the tail of the whole batch on one rank, then timed in turn.

On GPUs a tail is one CUDA graph with an event at either end, so that no launch of the host's is
timed. Before each replay the second-level cache is flushed and the ranks meet on the device; the
flush is long enough for the host to have everything queued behind it. Workspaces at several
addresses take turns, and so does the order that goes first. A sample is the slowest rank's time.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import torch

from engine.dist.connect import lead
from engine.dist.group import Group
from engine.dist.token_shards import TokenShards
from engine.dist.torchrun import launched, resolve_size
from engine.errors import ConfigError, DSparkError
from engine.kernels.capture import capture
from engine.kernels.hc_post import hc_post
from engine.models.draft_tail import TailOrder, head_states, received_bytes
from engine.placing import device_of

ORDERS: tuple[TailOrder, TailOrder] = ("gather first", "collapse first")
_DTYPE = torch.bfloat16
_WORKSPACES = 4
_FLUSH_BYTES = 512 << 20
"""Ten times the second-level cache of an H200; some 0.1 ms, which hides the host's launches."""

_CUDA_SAMPLES, _CPU_SAMPLES = 50, 5
_CUDA_WARMUP, _CPU_WARMUP = 20, 1


@dataclass(frozen=True, slots=True)
class TailShapes:
    """What is measured."""

    tokens: tuple[int, ...]
    hidden_size: int
    num_streams: int
    samples: int
    warm_up: int
    device: str


@dataclass(frozen=True, slots=True)
class TailTime:
    """Both orders at one number of tokens."""

    num_tokens: int
    num_local: int
    """Rows of each rank, padding included."""

    microseconds: dict[TailOrder, float]
    """Median over samples of the slowest rank's time."""

    quartiles: dict[TailOrder, tuple[float, float]]
    received_bytes: dict[TailOrder, int]
    """From the other ranks, by each rank."""

    @property
    def speedup(self) -> float:
        """How many times sooner the tail that collapses first is done."""
        before, after = (self.microseconds[order] for order in ORDERS)
        return before / after


def measure_collapse(
    device: str,
    ranks: int | None,
    tokens: tuple[int, ...],
    hidden_size: int,
    num_streams: int,
    samples: int | None,
) -> tuple[str, list[TailTime]]:
    """Bring up ranks, compare and time both orders, send the ranks away.

    Args:
        device: auto, cpu or cuda.
        ranks: How many; None: torchrun's.
        tokens: Numbers of tokens over all ranks.
        hidden_size: H.
        num_streams: S.
        samples: Of each order; None: 50 on GPUs, 5 on a CPU.

    Returns:
        What made the exchanges, and a time for each number of tokens.

    Raises:
        ConfigError: There is one rank only.
        DSparkError: The orders' outputs differ.
    """
    size = resolve_size(ranks, launched())
    if size == 1:
        raise ConfigError("one rank gathers nothing", "give -tp 2 or more, or use torchrun")
    at = device_of(device)
    on_gpu = at.type == "cuda"
    shapes = TailShapes(
        tokens=tokens,
        hidden_size=hidden_size,
        num_streams=num_streams,
        samples=samples or (_CUDA_SAMPLES if on_gpu else _CPU_SAMPLES),
        warm_up=_CUDA_WARMUP if on_gpu else _CPU_WARMUP,
        device=at.type,
    )
    group = lead(size, at, "nccl")  # nothing here is an all-reduce worth mapping memory for
    try:
        group.tell({"collapse": asdict(shapes)})
        return f"{group.ranks.name}, {size} ranks", play(group, shapes)
    finally:
        group.close()


def follow_collapse(group: Group, told: dict[str, Any]) -> None:
    """Take part, on another rank, until rank 0 is done."""
    play(group, TailShapes(**{**told, "tokens": tuple(told["tokens"])}))
    group.tell(None)


@torch.inference_mode()
def play(group: Group, shapes: TailShapes) -> list[TailTime]:
    """Measure on every rank; all get the same numbers."""
    with group.step():
        clock = _GraphClock if shapes.device == "cuda" else _WallClock
        timer = clock(group)
        return [_measure(group, shapes, n, timer) for n in shapes.tokens]


@dataclass(frozen=True, slots=True)
class _Workspace:
    """A rank's inputs of the tail, and what every rank is to get of it."""

    y: torch.Tensor  # [T', H], the last sublayer's output
    streams: torch.Tensor  # [T', S, H]
    pre: torch.Tensor  # [T', S] float32
    post: torch.Tensor  # [T', S] float32
    comb: torch.Tensor  # [T', S, S] float32
    shards: TokenShards
    want: torch.Tensor  # [T, H]

    @classmethod
    def make(cls, seed: int, num_tokens: int, shapes: TailShapes, group: Group) -> "_Workspace":
        """The same batch on every rank, and this rank's part of it."""
        device = torch.device(shapes.device)
        generator = torch.Generator(device=device).manual_seed(seed)
        s, h = shapes.num_streams, shapes.hidden_size

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=_DTYPE, device=device).normal_(generator=generator)

        def share(*shape: int) -> torch.Tensor:
            return torch.rand(shape, device=device, generator=generator)

        y, streams = normal(num_tokens, h), normal(num_tokens, s, h)
        pre, post = share(num_tokens, s), 2 * share(num_tokens, s)
        comb = share(num_tokens, s, s)
        shards = TokenShards(num_tokens, group.ranks)
        alone = TokenShards(num_tokens, Group().ranks)
        want = head_states(hc_post(y, streams, post, comb), pre, alone)

        def mine(x: torch.Tensor) -> torch.Tensor:
            return shards.cut(x).clone()  # at addresses of its own, the batch is let go

        return cls(mine(y), mine(streams), mine(pre), mine(post), mine(comb), shards, want)

    def tail(self, order: TailOrder) -> Callable[[], torch.Tensor]:
        """The tail in an order."""

        def body() -> torch.Tensor:
            streams = hc_post(self.y, self.streams, self.post, self.comb)
            return head_states(streams, self.pre, self.shards, order)

        return body


Timed = Callable[[], float]


class _WallClock:
    """Times of the host, for CPUs."""

    def __init__(self, group: Group) -> None:
        self._ranks = group.ranks
        self._meet = torch.zeros(1)

    def prepare(self, body: Callable[[], torch.Tensor], want: torch.Tensor) -> tuple[Timed, bool]:
        """A call that takes a time in microseconds; and did the body give what is wanted?"""

        def once() -> float:
            self._ranks.all_reduce(self._meet)
            begin = time.perf_counter()
            body()
            return (time.perf_counter() - begin) * 1e6

        return once, torch.equal(body(), want)


class _GraphClock:
    """Times between two events inside a CUDA graph."""

    def __init__(self, group: Group) -> None:
        self._ranks = group.ranks
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._meet = torch.zeros(1, device="cuda")

    def prepare(self, body: Callable[[], torch.Tensor], want: torch.Tensor) -> tuple[Timed, bool]:
        """As for a CPU; the body is called as it is, captured, and replayed."""
        eager: list[torch.Tensor] = []
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))

        def timed() -> torch.Tensor:
            start.record()
            result = body()
            end.record()
            return result

        graph, out = capture(timed, warm_up=lambda: eager.append(body()))
        right = torch.equal(eager[0], want)
        out.fill_(float("nan"))  # what is compared is the replay's
        graph.replay()
        right = right and torch.equal(out, want)

        def once() -> float:
            self._flush.zero_()
            self._ranks.all_reduce(self._meet)
            graph.replay()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        return once, right


def _measure(
    group: Group, shapes: TailShapes, num_tokens: int, clock: _WallClock | _GraphClock
) -> TailTime:
    """Both orders at one number of tokens; every rank enters, and leaves, with the others."""
    spaces = [_Workspace.make(i, num_tokens, shapes, group) for i in range(_WORKSPACES)]
    timed: dict[TailOrder, list[Timed]] = {order: [] for order in ORDERS}
    wrong: list[TailOrder] = []
    for space in spaces:
        for order in ORDERS:
            once, right = clock.prepare(space.tail(order), space.want)
            timed[order].append(once)
            wrong += [] if right else [order]
    everyones = group.control.exchange(sorted(set(wrong)))
    if any(everyones):
        raise DSparkError(
            f"{num_tokens} tokens: outputs differ from one rank's, by rank: {everyones}",
            "the collapse has to round every product and sum by itself on this device",
        )
    taken: dict[TailOrder, list[float]] = {order: [] for order in ORDERS}
    for sample in range(-shapes.warm_up, shapes.samples):
        turn, space_at = divmod(sample, _WORKSPACES)
        for order in ORDERS if turn % 2 else ORDERS[::-1]:
            spent = timed[order][space_at]()
            if sample >= 0:
                taken[order].append(spent)
    return _summary(group, shapes, num_tokens, taken)


def _summary(
    group: Group, shapes: TailShapes, num_tokens: int, taken: dict[TailOrder, list[float]]
) -> TailTime:
    """Medians and quartiles of the slowest ranks' times."""
    everyones = group.control.exchange(taken)
    slowest = {o: [max(t) for t in zip(*(r[o] for r in everyones), strict=True)] for o in ORDERS}
    cuts = {o: quantiles(t, n=4, method="inclusive") for o, t in slowest.items()}
    num_local = TokenShards(num_tokens, group.ranks).num_local
    return TailTime(
        num_tokens=num_tokens,
        num_local=num_local,
        microseconds={o: c[1] for o, c in cuts.items()},
        quartiles={o: (c[0], c[2]) for o, c in cuts.items()},
        received_bytes=received_bytes(
            num_local, group.size, shapes.num_streams, shapes.hidden_size, _DTYPE.itemsize
        ),
    )
