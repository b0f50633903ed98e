"""DeepSeek-V4 with each rank attending for its own requests: one rank's tokens, 1/N of its state.

Experts are summed over ranks, so equality in float32 is as in test_ranks.py: but for near ties.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, Request, SamplingParams, worker
from engine.checkpoints import plan_checkpoints
from engine.dist.group import Group
from engine.errors import ConfigError
from engine.kernels.paged_attention import AttentionBatch
from engine.kv.rolling import RollingState
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.layers import Placement
from engine.runner.batch import Members
from engine.sizing import bytes_of_block, bytes_of_rows
from tests.helpers.checkpoints import write_target
from tests.helpers.deepseek_v4 import write_deepseek_v4
from tests.helpers.deepseek_v41 import write_deepseek_v41
from tests.helpers.distributed import Ranks, run_ranks
from tests.helpers.engines import make_engine, outputs, prompts, randomise, requests, teach
from tests.helpers.host_graphs import use_host_graphs

Outputs = dict[str, tuple[int, ...]]
HOT = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=5)


@dataclass(frozen=True)
class Case:
    """One engine and what it is asked."""

    name: str
    many: list[Request]
    want: Outputs
    settings: dict[str, Any]
    hit_rate: float | None = None
    """Let the drafts be right this often; None: as they are."""

    plans: int | None = None
    """Let rank 0 plan at random, from this seed."""

    preempts: bool = False
    graphs: bool = False
    """Pad rounds as captured ones are."""

    model: Path | None = None
    """Another one than the rest's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_deepseek_v4(tmp_path_factory.mktemp("v4") / "v4")


def few_blocks(folder: Path, num_seqs: int, size: int) -> int:
    """Memory of a rank for the rings of its share of requests, and blocks for one or two."""
    config = EngineConfig(model=str(folder), draft=str(folder), device="cpu", kv_block_size=8)
    plan, _ = plan_checkpoints(config)
    at = Placement(torch.float32, torch.device("cpu"))
    rows = bytes_of_rows(plan, -(-num_seqs // size), at)
    return rows + 13 * bytes_of_block(config, plan, at)


def cases(folder: Path, size: int) -> list[Case]:
    # all but the first rank's end early: then it has two requests, and the others none
    params = [SamplingParams(max_tokens=2 if i % size else 12) for i in range(size + 2)]
    ids = [tuple(p) for p in prompts(size + 2, seed=3, longest=24)]
    greedy = [
        Request(request_id=str(i), prompt_token_ids=p, params=q)
        for i, (p, q) in enumerate(zip(ids, params, strict=True))
    ]
    plain = outputs(make_engine(folder), greedy)
    hot = requests(prompts(2, seed=4, longest=12), HOT)
    sampled = outputs(make_engine(folder, folder), hot)
    longer = requests(prompts(2 * size + 1, seed=7), max_tokens=16)
    long_plain = outputs(make_engine(folder), longer)
    tight = {"max_num_seqs": 2 * size + 1, "max_model_len": 80, "max_num_batched_tokens": 50}
    tight["kv_cache_memory_bytes"] = few_blocks(folder, 2 * size + 1, size)
    return [
        Case("greedy", greedy, plain, {"max_num_seqs": size + 1, "sharded_loop": "on"}, 0.7),
        Case("sampled, two at most", hot, sampled, {"max_num_seqs": 2, "sharded_loop": "off"}),
        Case("preempted, any plan", longer, long_plain, tight, 0.5, plans=2, preempts=True),
        Case("graphs, any plan", greedy, plain, {"max_num_seqs": size + 2}, plans=4, graphs=True),
    ]


def of_v41(folder: Path) -> Case:
    """Entries and choices handed on, and n-grams across rounds: their rings are the owner's."""
    model = write_deepseek_v41(folder / "v41")
    hot = requests(prompts(2, seed=6, longest=12), HOT)
    sampled = outputs(make_engine(model, model), hot)
    return Case("V4.1", hot, sampled, {"max_num_seqs": 2, "sharded_loop": "on"}, model=model)


def play(ranks: Ranks, folder: Path, many: list[Case]) -> None:
    told = ranks.group()  # of the test itself
    for case in many:
        model = case.model or folder
        engine = make_engine(
            model,
            model,
            group=ranks.group(),
            attention_parallel="data",
            audit=True,
            **case.settings,
        )
        if case.graphs:
            use_host_graphs(engine)
        if case.hit_rate is not None:
            teach(engine, case.want, case.hit_rate)
        if case.plans is not None:
            favour(engine)
        if case.plans is not None and ranks.rank == 0:
            randomise(engine, case.plans)
        seen = watch(engine)
        if ranks.rank:
            engine.mirror()
        else:
            want = {r.request_id: case.want[r.request_id] for r in case.many}
            assert outputs(engine, case.many) == want, case.name
            assert (engine.stats.preemptions > 0) == case.preempts, case.name
            assert engine.stats.kv_blocks_used == 0
            if case.name == "greedy":
                assert engine.stats.acceptance_length > 1.2
                again = {c.request.request_id: c for c in engine.run(case.many, speculate=False)}
                assert {i: c.token_ids for i, c in again.items()} == want  # type: ignore[union-attr]
            engine.close()
        check_state(engine, ranks, case, seen, told)


def favour(engine: Engine) -> None:
    """Let the first rank's drafts look better than all others: it has no room for so many."""
    steps = engine.runner.steps
    real: Callable[..., Any] = steps.draft

    def draft(members: Members, **how: Any) -> Any:
        drafts = real(members, **how)
        first = members.index % steps.net.ranks.size == 0
        return replace(drafts, survival=torch.where(first[:, None], 1.0, drafts.survival / 2))

    steps.draft = draft  # type: ignore[method-assign]


def watch(engine: Engine) -> list[tuple[int, int, int]]:
    """Of each pass of the target: tokens in all, of this rank with padding, and without."""
    seen: list[tuple[int, int, int]] = []
    target: Any = engine.runner.net.target
    real: Callable[..., Any] = target.forward

    def forward(
        ids: torch.Tensor, places: Any, slots: Any, batch: AttentionBatch, *rest: Any
    ) -> Any:
        if batch.own is not None:
            own = batch.own
            seen.append((len(ids), own.token.shape[1], int(own.batch.cu_seqlens_q[-1])))
        return real(ids, places, slots, batch, *rest)

    target.forward = forward
    return seen


def check_state(
    engine: Engine, ranks: Ranks, case: Case, seen: list[tuple[int, int, int]], told: Group
) -> None:
    """What is kept of requests is kept once, by their owner; weights of attention are whole."""
    net, limits = engine.runner.net, engine.limits
    assert isinstance(net.target, DeepseekV4)
    assert net.num_owners == ranks.size
    rows = -(-limits.max_num_seqs // ranks.size) + 1
    for state in (net.target_kv, net.draft_kv):
        if state is None:
            continue
        assert isinstance(state, RollingState)
        for layer in state.layers:
            assert layer.window.shape[0] == rows
            for each in (layer.compressed, layer.index):
                if each is not None:
                    assert each.rows.shape[0] == rows
                    slots = limits.num_blocks * limits.kv_block_size
                    assert each.entries.shape[0] == slots // each.ratio
    assert engine.stats.kv_blocks_total == limits.num_blocks * ranks.size
    spec = net.target.spec.layers
    attention, experts = net.target.layers[1].attention, net.target.layers[1].experts
    assert attention.heads == spec.num_heads
    each = -(-spec.experts.num_experts // ranks.size)
    left = spec.experts.num_experts - ranks.rank * each
    assert len(experts.gate_up) == min(each, left)
    assert seen
    # tokens of all ranks together are those of the batch, and nobody has more room than the rest
    total = told.control.exchange(seen)
    for together in zip(*total, strict=True):
        assert len({(t, room) for t, room, _ in together}) == 1, case.name
        assert sum(own for _, _, own in together) <= together[0][0]
        assert max(own for _, _, own in together) <= together[0][1]
    if not case.graphs and not case.preempts:
        idle = [t for t in zip(*total, strict=True) if min(own for _, _, own in t) == 0]
        assert idle, f"{case.name}: no rank was ever without tokens"


@pytest.mark.parametrize("size", [2, 3, 4] if "DSPARK_FULL" in os.environ else [3])
def test_tokens_are_those_of_one_rank(folder: Path, tmp_path: Path, size: int) -> None:
    """Plain, drafted, sampled; fewer requests than ranks, uneven ones; small chunks, preemption,
    any plan, and rounds padded as captured ones are."""
    run_ranks(play, size, folder, [*cases(folder, size), of_v41(tmp_path)], timeout=240)


def test_who_cannot_share_requests_is_told(tmp_path: Path) -> None:
    dense = write_target(tmp_path / "dense", "Qwen3ForCausalLM")
    for asked in ("tensor", "auto"):
        worker.check(EngineConfig(model=str(dense), attention_parallel=asked))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="attention-parallel data: Qwen3ForCausalLM is dense"):
        make_engine(dense, attention_parallel="data")
    config = EngineConfig(model="m", attention_parallel="data")
    (told,) = config.without_effect(on_cuda=False, num_ranks=1, has_confidence=False)
    assert told == "--attention-parallel has no effect: there is one process"


def test_rings_alone_have_blocks_of_a_size_too(tmp_path: Path) -> None:
    """A target without any compressed layer asks for none, and the default is by device: 0."""
    rings = write_deepseek_v4(tmp_path / "v4", kinds=("sliding_attention",) * 2)
    for how in ("tensor", "data", "auto"):
        worker.check(EngineConfig(model=str(rings), tensor_parallel_size=2, attention_parallel=how))
    chosen = make_engine(rings, kv_block_size=0).config
    assert chosen.kv_block_size == 16, "as it was chosen"
