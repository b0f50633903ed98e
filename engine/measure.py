"""How close a round comes to its matrix products: the numbers behind `dspark bench round`.

The floor of a round is the time of its matrix products alone, on this engine's own weights, in one
CUDA graph: target and draft layers, both uses of the vocabulary head, the context projections and
the Markov head's G products; as the engine multiplies or as torch does, whichever is faster. Where
a product of the engine's has the MLP's activation in it, that is taken where it is faster than
torch's product without: the activation never adds to the floor. It is measured right before and
right after the rounds, as long as they take: a card at its power limit slows down within a second,
and both have to meet the same one.
A CPU has no graphs; there the products are called. Of DeepSeek-V4 the floor is the time in which
the device copies as many bytes as the round has to read.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import linear

from engine.deepseek_v4_floor import round_bytes
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kernel_bench.timing import measure_ceiling
from engine.kernels.capture import capture
from engine.kernels.linear import Linear
from engine.kv.cache import PagedKV
from engine.kv.rolling import RollingState
from engine.models.decoder import Decoder
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_drafter import V4Drafter
from engine.models.drafter import Drafter
from engine.models.layers import DecoderLayer, Placement
from engine.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One batch size. Milliseconds per round."""

    num_reqs: int
    speculating: bool
    wall: float
    """Steady state: from one round's end to the next one's."""

    draft: float
    markov: float
    """Part of `draft`, timed alone."""

    verify: float
    gap: float
    """Wall time in which the device computed neither: waiting for the host."""

    floor: float
    """The matrix products alone, beside the rounds: the engine's or torch's, the faster ones."""

    torch_floor: float | None
    """Torch's; None where the floor is of bytes."""

    committed: float
    """Tokens a request commits per round."""

    kv_bytes: int
    """K and V the target's attention reads per round, at the middle of the measured stretch."""

    @property
    def ratio(self) -> float:
        """Wall time over the floor."""
        return self.wall / self.floor

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, in the steady state."""
        return self.num_reqs * self.committed / self.wall * 1e3


def measure_round(
    engine: Engine,
    num_reqs: int,
    *,
    speculate: bool = True,
    prompt_tokens: int = 128,
    rounds: int = 60,
    warmup: int = 12,
    temperature: float = 0.0,
) -> RoundTimes:
    """Time rounds of `num_reqs` requests in the engine's own loop.

    Args:
        engine: Idle; made for at least `num_reqs` requests.
        num_reqs: R.
        speculate: False times plain steps.
        prompt_tokens: Of each request; the prompts differ.
        rounds: Rounds to time.
        warmup: Rounds before them.
        temperature: Of every request.
    """
    width = engine.gamma + 1 if speculate and engine.gamma else 1
    floor = _Floor(_floors(engine, num_reqs, width))
    # who is admitted first decodes while the others' prompts are computed
    prefills = -(-num_reqs * prompt_tokens // engine.limits.max_num_batched_tokens)
    params = SamplingParams(
        max_tokens=width * (warmup + rounds + prefills + 8),
        ignore_eos=True,
        temperature=temperature,
    )
    engine.submit(
        _requests(engine, num_reqs, prompt_tokens, params), speculate=speculate, verify="all"
    )
    while len(engine.running) < num_reqs or any(not s.num_output for s in engine.running):
        if engine.step():
            engine.abandon()
            raise ConfigError(
                f"of {num_reqs} requests some end before all of them decode",
                "use a larger --max-model-len, or fewer or shorter prompts",
            )
    with _own_tiers(engine):
        return _timed(engine, num_reqs, width, floor, rounds, warmup)


def _requests(
    engine: Engine, count: int, prompt_tokens: int, params: SamplingParams
) -> list[Request]:
    ids = min(900, engine.vocab_size - 8)
    return [
        Request(
            request_id=f"measure {i}",
            prompt_token_ids=tuple((i * 7919 + j * 31) % ids + 8 for j in range(prompt_tokens)),
            params=params,
        )
        for i in range(count)
    ]


@contextmanager
def _own_tiers(engine: Engine) -> Iterator[None]:
    """Batches are not padded to the next larger size because that was measured before."""
    planner = engine.decisions.planner
    planner.own_tiers = True
    try:
        yield
    finally:
        planner.own_tiers = False


def _timed(
    engine: Engine, num_reqs: int, width: int, floor: "_Floor", rounds: int, warmup: int
) -> RoundTimes:
    """Rounds of requests that all decode; drops them in the end."""
    begin = time.perf_counter()
    for _ in range(warmup):
        engine.step()
    _synchronize(engine)
    engine.runner.clock.settle()  # or they would count as measured ones
    stretch = (time.perf_counter() - begin) / warmup * rounds
    floor.measure(stretch)
    before, tokens = dict(engine.stats.seconds), engine.stats.output_tokens
    begin = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    _synchronize(engine)
    wall = time.perf_counter() - begin
    floor.measure(stretch)
    engine.runner.clock.settle()
    after = engine.stats.seconds
    spent = {p: after.get(p, 0.0) - before.get(p, 0.0) for p in ("draft", "verify")}
    committed = (engine.stats.output_tokens - tokens) / rounds / num_reqs
    kv = sum(len(s.token_ids) for s in engine.running)
    engine.abandon()
    each = 1e3 / rounds
    return RoundTimes(
        num_reqs=num_reqs,
        speculating=width > 1,
        wall=wall * each,
        draft=spent["draft"] * each,
        markov=_markov_ms(engine, num_reqs) if width > 1 else 0.0,
        verify=spent["verify"] * each,
        gap=max(wall - spent["draft"] - spent["verify"], 0.0) * each,
        floor=floor.least,
        torch_floor=None if isinstance(engine.runner.net.target, DeepseekV4) else floor.of_torch,
        committed=committed,
        kv_bytes=kv * _kv_bytes_per_token(engine),
    )


def describe(engine: Engine) -> dict[str, str]:
    """What was measured, on what."""
    config, device = engine.config, engine.runner.rows.device
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "model": config.model,
        "draft": config.draft or "none",
        "dtype": config.dtype,
        "gamma": str(engine.gamma),
    }


class _Product(NamedTuple):
    matrix: Linear
    rows: int
    gates: bool = False
    """Its outputs are an MLP's gate and up."""

    @property
    def in_one(self) -> bool:
        """Does the engine multiply and activate in one kernel that cannot only multiply?"""
        few = self.matrix.takes_few(self.rows)
        return self.gates and not few and self.matrix.tiles(self.rows, gated=True) is not None


_Way = Literal["ours", "in one", "torch"]
"""The engine's products alone; with the activation where one kernel does both; torch's."""


def _round_products(engine: Engine, num_reqs: int, width: int) -> list[_Product]:
    """Every product of a round, in order."""
    net = engine.runner.net
    products: list[_Product] = []
    target, draft = _dense(engine)
    gamma = net.num_speculative_tokens
    if draft is not None and width > 1:
        rows = num_reqs * (gamma + (0 if draft.spec.sample_from_anchor else 1))
        products += _layer_products(draft.layers, rows)
        products.append(_Product(draft.lm_head, num_reqs * gamma))
        if draft.markov.w2 is not None:
            products += [_Product(draft.markov.w2, num_reqs)] * gamma
    products += _layer_products(target.layers, num_reqs * width)
    products.append(_Product(target.lm_head, num_reqs * width))
    if draft is not None and width > 1:
        products += [_Product(matrix, num_reqs * width) for matrix in (draft.fc, draft.context_kv)]
    return products


class _Floor:
    """What a round takes at the least, over several stretches of time."""

    def __init__(self, timers: list[Callable[[], float]]) -> None:
        """Take what says milliseconds, torch's last."""
        self._timers = timers
        self._times: list[list[float]] = [[] for _ in timers]

    def measure(self, seconds: float) -> None:
        """Measure for `seconds`."""
        for timer, times in zip(self._timers, self._times, strict=True):
            times += _repeat(timer, seconds / len(self._timers))

    @property
    def least(self) -> float:
        return min(map(median, self._times))

    @property
    def of_torch(self) -> float:
        return median(self._times[-1])


def _floors(engine: Engine, num_reqs: int, width: int) -> list[Callable[[], float]]:
    """What says how many milliseconds a round takes at the least; with torch alone comes last."""
    net = engine.runner.net
    if not isinstance(net.target, DeepseekV4):
        products = _round_products(engine, num_reqs, width)
        ways: list[_Way] = ["ours"] if any(p.matrix.multiplies(p.rows) for p in products) else []
        ways += ["in one"] if any(p.in_one for p in products) else []
        ways += ["torch"] if ways else ["ours"]  # which is then torch's, or of packed matrices
        return [_timer(engine, lambda: None, products, way) for way in ways]
    assert net.draft is None or isinstance(net.draft, V4Drafter)
    gamma = net.num_speculative_tokens
    read = round_bytes(net.target, net.draft, num_reqs, width, gamma)
    at = Placement(net.target.embedding.dtype, engine.runner.rows.device)
    milliseconds = 1e3 * read / measure_ceiling(at).copy
    return [lambda: milliseconds]


def _dense(engine: Engine) -> tuple[Decoder, Drafter | None]:
    """The networks, of which every token takes every product."""
    target, draft = engine.runner.net.target, engine.runner.net.draft
    assert isinstance(target, Decoder)
    assert draft is None or isinstance(draft, Drafter)
    return target, draft


def _layer_products(layers: list[DecoderLayer], rows: int) -> list[_Product]:
    return [
        _Product(matrix, rows, gates=matrix is layer.gate_up)
        for layer in layers
        for matrix in layer.products
    ]


def _markov_ms(engine: Engine, num_reqs: int) -> float:
    """Milliseconds of the Markov chain of a greedy batch, alone."""
    from engine.kernels.markov import markov_chain

    net, device = engine.runner.net, engine.runner.rows.device
    draft = net.draft
    assert draft is not None
    gamma, hidden = net.num_speculative_tokens, draft.spec.layers.hidden_size
    dtype = net.target.embedding.dtype
    base = torch.randn(num_reqs, gamma, draft.num_logits, device=device, dtype=dtype)
    states = torch.randn(num_reqs, gamma, hidden, device=device, dtype=dtype)
    index = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    params = engine.runner.rows.params(index)

    def chain() -> None:
        markov_chain(
            base, states, index, draft.markov, draft.draft_to_target, params, index, sampled=False
        )

    return median(_repeat(_timer(engine, chain, []), 0.05))


@torch.inference_mode()
def _timer(
    engine: Engine,
    body: Callable[[], None],
    products: list[_Product],
    way: _Way = "ours",
) -> Callable[[], float]:
    """What runs `body` and the products once and says how many milliseconds that took.

    One graph where there are graphs; calls elsewhere.
    """
    device = engine.runner.rows.device
    dtype = engine.runner.net.target.embedding.dtype
    inputs = {
        (p.matrix.in_features, p.rows): torch.randn(
            p.rows, p.matrix.in_features, device=device, dtype=dtype
        )
        for p in products
    }

    @torch.inference_mode()
    def work() -> None:
        body()
        for p in products:
            matrix, x = p.matrix, inputs[p.matrix.in_features, p.rows]
            if way == "torch":
                linear(x, matrix.weight, matrix.bias)
            elif way == "in one" and p.in_one:
                matrix.gated(x)
            else:
                matrix(x)

    if device.type != "cuda":
        return lambda: 1e3 * _wall(work)
    graph, _ = capture(work)

    def replay() -> float:
        assert inputs is not None  # the graph reads them: they live as long as it does
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    replay()
    return replay


def _repeat(timer: Callable[[], float], seconds: float) -> list[float]:
    """Times of runs one after the other: for `seconds`, but at least 5."""
    times: list[float] = []
    while len(times) < 5 or sum(times) < 1e3 * seconds:
        times.append(timer())
    return times


def _wall(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _synchronize(engine: Engine) -> None:
    if engine.runner.rows.device.type == "cuda":
        torch.cuda.synchronize()


def _kv_bytes_per_token(engine: Engine) -> int:
    kv = engine.runner.net.target_kv
    if isinstance(kv, RollingState):
        states = [s for layer in kv.layers for s in (layer.compressed, layer.index) if s]
        return sum(s.entries[0].nbytes // s.ratio for s in states)
    assert isinstance(kv, PagedKV)
    return 2 * kv.k.shape[0] * kv.k.shape[2] * kv.k.shape[3] * kv.k.element_size()
