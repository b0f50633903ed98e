"""KV memory is what the largest steps leave; on a GPU the account must hold for a whole run."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import CapacityError, Engine, EngineConfig, SamplingParams
from engine.dist.group import Group
from engine.kernels.linear import Linear
from engine.kv.cache import PagedKV
from engine.models.decoder import Decoder
from engine.runner.model_runner import ModelRunner
from engine.runner.steps import Networks
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.spec.plan import Plan
from engine.spec.tiers import graph_tiers
from engine.warmup import MemoryUse, Sizes, shrink_to_fit, warm_up
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine, outputs, prompts, requests

GIB = 1 << 30


@dataclass
class Ledger:
    """A device that steps take memory from: `held` stays, `cached` may be given back."""

    total: int = 1000
    held: int = 100
    cached: int = 0
    most: int = 0
    driver: int = 7
    events: list[str] = field(default_factory=list)

    def take(self, size: int, kept: int = 0) -> None:
        self.cached = max(self.cached, size)
        self.most = max(self.most, self.held + self.cached)
        self.held += kept

    def release(self) -> None:
        self.cached = 0

    def reserved(self) -> int:
        return self.held + self.cached

    def peak(self) -> int:
        return self.most

    def watch(self) -> None:
        self.most = self.reserved()

    def outside(self) -> int:
        return self.driver


@pytest.fixture
def scratch(tmp_path: Path) -> Networks:
    """A pair whose caches have one block."""
    engine = make_engine(
        write_target(tmp_path / "t", "Qwen3ForCausalLM"), write_draft(tmp_path / "d")
    )
    net = engine.runner.net
    assert net.draft_kv is not None

    def one_block(kv: PagedKV) -> PagedKV:
        size = kv.kv_block_size
        return PagedKV(kv.k[:, :size].clone(), kv.v[:, :size].clone(), size)

    return replace(net, target_kv=one_block(net.target_kv), draft_kv=one_block(net.draft_kv))


SIZES = Sizes(
    max_num_seqs=6, max_num_batched_tokens=50, max_model_len=64, lookahead=5, kv_block_size=4
)


def test_the_largest_steps_run_and_are_accounted_for(
    scratch: Networks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    real_prefill, real_round = ModelRunner.prefill, ModelRunner.round
    captured: set[tuple[int, bool]] = set()

    def prefill(self: ModelRunner, chunks: Items[Chunk]) -> Any:
        ledger.events.append(f"prefill {sum(c.count for c in chunks)} tokens of {len(chunks)}")
        ledger.take(40)
        return real_prefill(self, chunks)

    def round_(self: ModelRunner, sequences: Items[Sequence], plan: Plan) -> Any:
        hot = sequences[0].request.params.temperature > 0
        ledger.events.append(f"round of {len(sequences)}{' sampled' if hot else ''}")
        new = (len(sequences), hot) not in captured
        captured.add((len(sequences), hot))
        ledger.driver += 3 * new  # what the driver takes for a graph
        ledger.take(60 if hot else 20, kept=(30 if hot else 20) * (new and len(sequences) > 1))
        return real_round(self, sequences, plan)

    monkeypatch.setattr(ModelRunner, "prefill", prefill)
    monkeypatch.setattr(ModelRunner, "round", round_)
    use = warm_up(scratch, SIZES, torch.device("cpu"), ledger, use_graphs=False)
    assert ledger.events == [
        "prefill 50 tokens of 6",
        "round of 6",
        "prefill 50 tokens of 6",
        "round of 6 sampled",
        "prefill 50 tokens of 6",
        "prefill 16 tokens of 1",
        "round of 1",
    ]
    # 100 held, 20 kept by the first round, 60 taken by the second: the highest of all moments
    assert (use.weights, use.steps, use.graphs, use.graph_pool) == (100, 90, 0, 0)
    assert use.outside == ledger.driver
    assert use.left(0.9) == 900 - 100 - 90 - ledger.driver


@pytest.mark.parametrize("tiled", [True, False])
def test_products_of_some_rows_are_built_before_the_run(
    scratch: Networks, monkeypatch: pytest.MonkeyPatch, tiled: bool
) -> None:
    """A device on which 17 to 128 rows have kernels of their own met them in mid-run: 3 s."""
    rows, real = [], ModelRunner.prefill

    def prefill(self: ModelRunner, chunks: Items[Chunk]) -> Any:
        rows.append(sum(c.count for c in chunks))
        return real(self, chunks)

    monkeypatch.setattr(ModelRunner, "prefill", prefill)
    monkeypatch.setattr(Linear, "tiles", lambda *_given, **_more: None)
    assert isinstance(scratch.target, Decoder)
    scratch.target.layers[0].gate_up.tiled = tiled
    for longest, more in ((200, [64, 128]), (60, [59, 59])):
        rows.clear()
        sizes = replace(SIZES, max_model_len=longest)
        warm_up(scratch, sizes, torch.device("cpu"), Ledger(), use_graphs=False)
        assert rows[3:] == [16, *(more if tiled else [])]


def test_kernels_that_a_short_prompt_loads_are_not_counted_for_every_graph(
    scratch: Networks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    real_init, real_prefill, real_round = (
        ModelRunner.__init__,
        ModelRunner.prefill,
        ModelRunner.round,
    )

    def init(self: ModelRunner, *given: Any, use_graphs: bool, **more: Any) -> None:
        real_init(self, *given, use_graphs=False, **more)

    def prefill(self: ModelRunner, chunks: Items[Chunk]) -> Any:
        ledger.driver += 50 * (len(chunks) == 1)
        return real_prefill(self, chunks)

    def round_(self: ModelRunner, sequences: Items[Sequence], plan: Plan) -> Any:
        ledger.driver += 3
        return real_round(self, sequences, plan)

    monkeypatch.setattr(ModelRunner, "__init__", init)
    monkeypatch.setattr(ModelRunner, "prefill", prefill)
    monkeypatch.setattr(ModelRunner, "round", round_)
    use = warm_up(scratch, SIZES, torch.device("cpu"), ledger, use_graphs=True)
    assert use.graphs == 3 * len(graph_tiers(SIZES.max_num_seqs))
    assert use.outside == 7 + 50 + 3 * 3


def test_the_largest_prefill_is_cut_where_requests_are_few_or_short(scratch: Networks) -> None:
    """2 requests of at most 63 tokens cannot fill 500; 3 tokens cannot start 6 requests."""
    for sizes in (
        replace(SIZES, max_num_seqs=2, max_num_batched_tokens=500),
        replace(SIZES, max_num_batched_tokens=3),
    ):
        warm_up(scratch, sizes, torch.device("cpu"), Ledger(), use_graphs=False)


def use_of(config: EngineConfig, per_request: int) -> MemoryUse:
    assert config.max_num_seqs is not None
    return MemoryUse(
        total=24 * GIB,
        weights=16 * GIB,
        steps=config.max_num_seqs * per_request,
        graphs=GIB // 4,
        outside=GIB // 4,
        graph_pool=123,
    )


def test_sizes_that_nobody_asked_for_shrink_until_something_is_left() -> None:
    seen: list[tuple[int | None, int | None]] = []

    def measure(config: EngineConfig) -> MemoryUse:
        seen.append((config.max_num_seqs, config.max_num_batched_tokens))
        if config.max_num_seqs == 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return use_of(config, GIB // 16)

    released: list[int] = []
    config = EngineConfig(model="m")
    config, room = shrink_to_fit(config, measure, lambda: released.append(1), GIB, Group())
    assert seen == [(256, 8192), (128, 4096), (64, 2048)]
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 2048)
    assert room.kv_bytes == int(24 * GIB * 0.9) - int(20.5 * GIB)
    assert room.graph_pool_bytes == 123
    assert len(released) == 2


@pytest.mark.parametrize("fails", [True, False])
def test_sizes_asked_for_do_not_shrink_and_the_error_has_the_numbers(fails: bool) -> None:
    def measure(config: EngineConfig) -> MemoryUse:
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return use_of(config, GIB // 16)

    config = EngineConfig(model="m", max_num_seqs=128, max_num_batched_tokens=4096)
    with pytest.raises(CapacityError) as info:
        shrink_to_fit(config, measure, lambda: None, 3 * GIB, Group())
    text = str(info.value)
    assert "0.00 GiB are left for KV with --max-num-seqs 128" in text
    assert "at least 3.00 GiB are needed" in text
    if fails:
        assert text.endswith("do not fit: CUDA out of memory. Tried to allocate 9 GiB")
    else:
        assert "16.00 GiB weights, 8.00 GiB the largest prefill and round" in text
    assert "--max-num-seqs" in info.value.hint


def test_another_error_is_not_taken_for_lack_of_memory() -> None:
    def measure(config: EngineConfig) -> MemoryUse:
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        shrink_to_fit(EngineConfig(model="m"), measure, lambda: None, 1, Group())


@pytest.fixture
def shape_engine() -> Iterator[Engine]:
    config = EngineConfig(
        model="shape:qwen3-4b", draft="shape:qwen3-4b", device="cuda", gpu_memory_utilization=0.6
    )
    yield Engine(config)
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_run_stays_within_its_share(shape_engine: Engine) -> None:
    """The largest prefills and rounds of every size, greedy and sampled: 0.6 of the device."""
    engine, tiers = shape_engine, graph_tiers(256)
    hot = SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9)
    for params in (SamplingParams(max_tokens=6), hot):
        for count in (tiers[3], tiers[-3], tiers[-1]):
            many = requests(prompts(count, longest=150, vocab=900), params)
            assert len(outputs(engine, many)) == count
    free, total = torch.cuda.mem_get_info()
    torch.cuda.synchronize()
    print(f"{(total - free) / total:.3f} of the device, 0.6 allowed; {engine.limits}")
    assert (total - free) / total <= 0.61
    assert engine.limits.num_blocks * engine.limits.kv_block_size > 256 * 1024
    assert engine.stats.preemptions == 0
