"""Every kind of captured round after every other one: what one leaves behind changes nothing.

Metadata of the round before, in a buffer that the next one reads, has crashed other engines. The
same rounds on the same live rows run eagerly in a second engine; tokens are equal in float32.
Without a GPU, host_graphs.py replays: buffers, padding and tiers are the same, capture is not.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.runner.pending import RoundResult
from engine.spec.plan import Plan
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import prompts
from tests.helpers.host_graphs import use_host_graphs

LARGEST = 8
GREEDY_ROWS, HOT_ROWS = LARGEST, 4
LONGEST = 400
"""Tokens after which rows start over."""


Mode = Literal["off", "plain", "full", "compact"]
"""off: no drafter at all; plain: it is fed but not asked."""


class Turn(NamedTuple):
    """A round to make."""

    count: int
    mode: Mode
    hot: bool


def turns_of(counts: Items[int], modes: Items[Mode]) -> list[Turn]:
    return [Turn(*t) for t in itertools.product(counts, modes, (False, True))]


class Variant(NamedTuple):
    """Sizes of captured rounds, and which rounds to make of them."""

    tiers: list[int]
    turns: list[Turn]


VARIANTS = {
    "exact": Variant(
        list(range(1, LARGEST + 1)),
        turns_of(range(1, LARGEST + 1), ("off", "full", "compact")),
    ),
    "padded": Variant([1, 2, 5, 8], turns_of((1, 3, 4, 7), ("off", "plain", "full", "compact"))),
    # no padding, and two amounts of it in one tier
    "small": Variant([1, 4], turns_of((1, 2, 3), ("off", "plain", "full", "compact"))),
}


def every_ordered_pair(items: Items[Turn]) -> Iterator[Turn]:
    """A cycle in which each item comes right after each, itself included, exactly once."""
    for i, first in enumerate(items):
        yield first
        for second in items[i + 1 :]:
            yield first
            yield second
    yield items[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_cycle_has_every_ordered_pair(name: str) -> None:
    turns = VARIANTS[name].turns
    pairs = list(itertools.pairwise(every_ordered_pair(turns)))
    assert len(pairs) == len(set(pairs)) == len(turns) ** 2 >= 24 * 24


class Driver:
    """Makes chosen rounds of chosen rows with an engine's own parts."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self.engine = engine
        self._many = [
            Request(
                request_id=str(i),
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(
                    max_tokens=10**6,
                    ignore_eos=True,
                    temperature=0.0 if i < GREEDY_ROWS else 0.9,
                    top_p=1.0 if i < GREEDY_ROWS else 0.9,
                    seed=i,
                ),
            )
            for i, prompt in enumerate(prompts(GREEDY_ROWS + HOT_ROWS, seed=4, vocab=vocab))
        ]
        self.start()

    @torch.inference_mode()
    def start(self) -> None:
        """Prefill all rows; no round is made."""
        engine = self.engine
        engine.abandon()
        engine.submit(self._many)
        while chunks := engine._scheduler.prefill():
            engine._turns._prefill(chunks, time.perf_counter())
            engine._turns.take(engine._turns.launched)
            engine._turns.launched = []
        self.sequences = {int(s.request.request_id): s for s in engine.running}
        assert len(self.sequences) == len(self._many)

    @torch.inference_mode()
    def turn(self, rows: Items[int], mode: Mode, plan: Plan) -> list[list[int]]:
        """A round of those rows; per row: tokens committed, queries verified, and the tokens."""
        engine = self.engine
        engine.runner.steps.speculating = mode != "off"
        batch = [self.sequences[row] for row in rows]
        for sequence in batch:
            engine._scheduler._extend(sequence)
        values = engine.runner.round(batch, plan).wait()
        width = 1 if plan.path == "plain" else engine.gamma + 1
        result = RoundResult.unpack(values, width)
        counts, lens = result.committed.tolist(), result.verify_lens.tolist()
        ids = result.token_ids.tolist()
        for sequence, count, length, tokens in zip(batch, counts, lens, ids, strict=True):
            assert 1 <= count <= length
            assert not engine.commits.take([(sequence, tokens[:count], length)], 0.0)
        return [[n, m, *tokens] for n, m, tokens in zip(counts, lens, ids, strict=True)]

    @property
    def longest(self) -> int:
        return max(len(s.token_ids) for s in self.sequences.values())


def rows_for(turn: Turn, rng: random.Random) -> list[int]:
    """Which rows make that round, in any order: one hot row makes a batch sampled."""
    greedy = rng.sample(range(GREEDY_ROWS), GREEDY_ROWS)
    if not turn.hot:
        return greedy[: turn.count]
    hot = rng.sample(range(GREEDY_ROWS, GREEDY_ROWS + HOT_ROWS), rng.randint(1, HOT_ROWS))
    rows = (hot + greedy)[: turn.count]
    rng.shuffle(rows)
    return rows


def plans_for(turn: Turn, gamma: int, tiers: list[int], rng: random.Random) -> tuple[Plan, Plan]:
    """The same round with slots of a graph, and with none to spare."""
    count = turn.count
    slots = next(tier for tier in tiers if tier >= count)
    if turn.mode in ("off", "plain"):
        return Plan("plain", None, slots, slots), Plan("plain", None, count, count)
    if turn.mode == "full":
        whole = gamma + 1
        return Plan("full", None, slots, slots * whole), Plan("full", None, count, count * whole)
    tokens = 3 * slots
    budget = rng.randint(0, min(tokens - count, count * gamma))
    return Plan("compact", budget, slots, tokens), Plan("compact", budget, count, count + budget)


def replay_every_pair(captured: Driver, eager: Driver, variant: Variant) -> None:
    graphs, gamma = captured.engine.runner.graphs, captured.engine.gamma
    assert graphs is not None
    assert eager.engine.runner.graphs is None
    rng, before = random.Random(0), None
    shapes = set()
    for i, turn in enumerate(every_ordered_pair(variant.turns)):
        rows = rows_for(turn, rng)
        padded, exact = plans_for(turn, gamma, variant.tiers, rng)
        got = captured.turn(rows, turn.mode, padded)
        want = eager.turn(rows, turn.mode, exact)
        assert got == want, f"{turn} after {before}, turn {i}, rows {rows}"
        if max(captured.longest, eager.longest) > LONGEST:
            captured.start()
            eager.start()
        before = turn
        shapes.add((turn.mode != "off", turn.hot, padded.path, padded.requests, padded.tokens))
    assert len(shapes) == sum(map(len, graphs._verifies.values())), "each was captured once"


def engine_of(target: str, draft: str, device: str, *, eager: bool) -> Engine:
    return Engine(
        EngineConfig(
            model=target,
            draft=draft,
            device=device,  # type: ignore[arg-type]
            dtype="float32",
            max_num_seqs=GREEDY_ROWS + HOT_ROWS,
            max_model_len=512,
            kv_block_size=16,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False,
            enforce_eager=eager,
            verify="all",
            threads=1,
        )
    )


@pytest.mark.parametrize("variant", ["padded" if "DSPARK_FULL" in os.environ else "small"])
def test_on_the_host(tmp_path: Path, variant: str) -> None:
    pair = (
        str(write_target(tmp_path / "t", "Qwen3ForCausalLM")),
        str(write_draft(tmp_path / "d", markov="rnn")),
    )
    captured, eager = (engine_of(*pair, "cpu", eager=True) for _ in range(2))
    use_host_graphs(captured)
    replay_every_pair(Driver(captured, 128), Driver(eager, 128), VARIANTS[variant])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_tiny_networks_on_a_gpu(tmp_path: Path, variant: str, markov: str) -> None:
    pair = (
        str(write_target(tmp_path / "t", "Qwen3ForCausalLM")),
        str(write_draft(tmp_path / "d", markov=markov)),
    )
    captured, eager = (engine_of(*pair, "cuda", eager=e) for e in (False, True))
    replay_every_pair(Driver(captured, 128), Driver(eager, 128), VARIANTS[variant])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_demo_pair_on_a_gpu(variant: str) -> None:
    """Real drafts: rounds keep several tokens, and rows move by unequal steps."""
    captured, eager = (engine_of("demo", "demo", "cuda", eager=e) for e in (False, True))
    replay_every_pair(Driver(captured, 900), Driver(eager, 900), VARIANTS[variant])
    assert eager.stats.acceptance_length > 1.1
