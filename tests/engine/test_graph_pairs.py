"""Every kind of captured round after every other one: what one leaves behind changes nothing.

Metadata of the round before, in a buffer that the next one reads, has crashed other engines. The
same rounds on the same live rows run eagerly in a second engine; tokens are equal in float32.
Without a GPU, host_graphs.py replays: buffers, padding and tiers are the same, capture is not.
"""

import itertools
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


Kind = Literal["bare", "plain", "few", "full"]
"""A plain step without and with draft context, and rounds that verify few or all drafts."""


class Turn(NamedTuple):
    """A round to make."""

    count: int
    kind: Kind
    hot: bool


KINDS: tuple[Kind, ...] = ("bare", "plain", "few", "full")
TURNS = [Turn(*t) for t in itertools.product((1, 3, 6, LARGEST), KINDS, (False, True))]


def every_ordered_pair(items: Items[Turn]) -> Iterator[Turn]:
    """A cycle in which each item comes right after each, itself included, exactly once."""
    for i, first in enumerate(items):
        yield first
        for second in items[i + 1 :]:
            yield first
            yield second
    yield items[0]


def test_the_cycle_has_every_ordered_pair() -> None:
    cycle = list(every_ordered_pair(TURNS))
    pairs = list(itertools.pairwise(cycle))
    assert len(pairs) == len(set(pairs)) == len(TURNS) ** 2 == 32 * 32


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
            engine._prefill(chunks, time.perf_counter())
            engine._take(engine._launched)
            engine._launched = []
        self.sequences = {int(s.request.request_id): s for s in engine.running}
        assert len(self.sequences) == len(self._many)

    @torch.inference_mode()
    def turn(self, rows: Items[int], kind: Kind, slots: int) -> list[list[int]]:
        """A round of those rows in so many slots; per row its committed tokens."""
        engine = self.engine
        engine.runner.steps.speculating = kind != "bare"
        batch = [self.sequences[row] for row in rows]
        for sequence in batch:
            engine._scheduler._extend(sequence)
        plan = plan_of(kind, len(rows), slots, engine.gamma)
        values = engine.runner.round(batch, plan).wait()
        width = 1 if plan.path == "plain" else engine.gamma + 1
        result = RoundResult.unpack(values, width)
        lens = result.verify_lens.tolist()
        assert sum(lens) == len(rows) + {
            "few": len(rows) // 2,
            "full": len(rows) * engine.gamma,
        }.get(kind, 0)
        committed = []
        for sequence, count, ids, verify_len in zip(
            batch, result.committed.tolist(), result.token_ids.tolist(), lens, strict=True
        ):
            assert 1 <= count <= verify_len
            assert engine._commit(sequence, ids[:count], verify_len) == []
            committed.append(ids[:count])
        return committed

    @property
    def longest(self) -> int:
        return max(len(s.token_ids) for s in self.sequences.values())


def plan_of(kind: Kind, num: int, slots: int, gamma: int) -> Plan:
    """In `slots` slots; a compact round's tokens are padded to two a slot."""
    if kind == "full":
        return Plan("full", None, slots, slots * (gamma + 1))
    if kind == "few":
        return Plan("compact", num // 2, slots, 2 * slots)
    return Plan("plain", None, slots, slots)


def rows_for(turn: Turn, rng: random.Random) -> list[int]:
    """Which rows make that round, in any order: one hot row makes a batch sampled."""
    greedy = rng.sample(range(GREEDY_ROWS), GREEDY_ROWS)
    if not turn.hot:
        return greedy[: turn.count]
    hot = rng.sample(range(GREEDY_ROWS, GREEDY_ROWS + HOT_ROWS), rng.randint(1, HOT_ROWS))
    rows = (hot + greedy)[: turn.count]
    rng.shuffle(rows)
    return rows


def replay_every_pair(captured: Driver, eager: Driver, tiers: list[int]) -> None:
    graphs = captured.engine.runner.graphs
    assert graphs is not None
    assert eager.engine.runner.graphs is None
    rng = random.Random(0)
    # rising sizes first: each finds its own tier uncaptured, and no larger one to use instead
    turns = [*sorted(TURNS), *every_ordered_pair(TURNS)]
    for i, turn in enumerate(turns):
        rows = rows_for(turn, rng)
        slots = next(tier for tier in tiers if tier >= len(rows))
        got = captured.turn(rows, turn.kind, slots)
        want = eager.turn(rows, turn.kind, len(rows))
        assert got == want, f"{turn} after {turns[i - 1]}, turn {i}, rows {rows}"
        if captured.longest > LONGEST:
            captured.start()
            eager.start()
    used = {next(tier for tier in tiers if tier >= turn.count) for turn in TURNS}
    kinds = {
        (needs.speculating, needs.sampled, path, requests)
        for needs, graphs_of in graphs._verifies.items()
        for path, requests, _ in graphs_of
    }
    # bare and plain steps, few and all drafts; greedy and sampled
    assert len(kinds) == 4 * 2 * len(used)


TIERS = {"exact": [1, 3, 6, 8], "padded": [2, 5, 7, 10]}


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


def test_on_the_host(tmp_path: Path) -> None:
    pair = (
        str(write_target(tmp_path / "t", "Qwen3ForCausalLM")),
        str(write_draft(tmp_path / "d", markov="rnn")),
    )
    captured, eager = (engine_of(*pair, "cpu", eager=True) for _ in range(2))
    use_host_graphs(captured)
    replay_every_pair(Driver(captured, 128), Driver(eager, 128), TIERS["padded"])


@pytest.mark.gpu
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_tiny_networks_on_a_gpu(tmp_path: Path, tiers: str, markov: str) -> None:
    pair = (
        str(write_target(tmp_path / "t", "Qwen3ForCausalLM")),
        str(write_draft(tmp_path / "d", markov=markov)),
    )
    captured, eager = (engine_of(*pair, "cuda", eager=e) for e in (False, True))
    replay_every_pair(Driver(captured, 128), Driver(eager, 128), TIERS[tiers])


@pytest.mark.gpu
@pytest.mark.parametrize("tiers", TIERS)
def test_the_demo_pair_on_a_gpu(tiers: str) -> None:
    """Real drafts: rounds keep several tokens, and rows move by unequal steps."""
    captured, eager = (engine_of("demo", "demo", "cuda", eager=e) for e in (False, True))
    replay_every_pair(Driver(captured, 900), Driver(eager, 900), TIERS[tiers])
    assert eager.stats.acceptance_length > 1.2
