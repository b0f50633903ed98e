"""Steps that run out of memory: the run goes on, smaller, and nobody can tell from the output."""

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine import CapacityError, Completion, Engine, EngineConfig, SamplingParams
from engine.config import VerifyMode
from engine.kernels.acceptance import Drafts
from engine.runner.batch import Members, Needs
from engine.runner.graphs import DraftGraph
from engine.runner.out_of_memory import is_out_of_memory
from engine.spec.plan import Plan
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine, outputs, prompts, randomise, requests
from tests.helpers.host_graphs import use_host_graphs

GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=3)
PLACES = ("start", "prefill", "first_tokens", "draft", "verify", "capture", "results")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "t", "Qwen3ForCausalLM"), write_draft(folder / "d")


@pytest.fixture(scope="module")
def wanted(pair: tuple[Path, Path]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Undisturbed outputs, greedy and sampled."""
    alone = make_engine(*pair, max_num_seqs=1)
    greedy = outputs(alone, requests(prompts(10), GREEDY))
    sampled = outputs(alone, requests(prompts(10), SAMPLED))
    gc.freeze()  # a shortage collects garbage: what the first engine imported need not be visited
    return {"greedy": greedy, "sampled": sampled}


class Trouble:
    """Runs out of memory at chosen calls of chosen places, before or after the work is done."""

    def __init__(self, engine: Engine, place: str, when: set[int], late: bool) -> None:
        self.raised = 0
        self._calls = 0
        self._when = when
        runner = engine.runner
        owner, name = {
            "start": (runner, "start"),
            "prefill": (runner.steps, "prefill"),
            "first_tokens": (runner.steps, "first_tokens"),
            "draft": (runner.steps, "draft"),
            "verify": (runner.steps, "verify"),
            "capture": (runner.graphs, "record"),
            "results": (runner, "verify"),
        }[place]
        real: Callable[..., Any] = getattr(owner, name)

        def attempt(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            wrong = self._calls in self._when
            self.raised += wrong
            if wrong and not late:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            out = real(*args, **kwargs)
            if wrong:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
            return out

        setattr(owner, name, attempt)


class FailingOps(TorchDispatchMode):
    """The n-th op of torch finds no memory for its result, for each n of `when`."""

    def __init__(self, when: set[int]) -> None:
        super().__init__()
        self.count = self.raised = 0
        self._when = when

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self._when:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
        return op(*args, **(kwargs or {}))


def teach_rows(engine: Engine, answers: dict[str, tuple[int, ...]], hit_rate: float) -> None:
    """As `teach`, by the rows' own positions: host and device may be a round apart."""
    steps, rng = engine.runner.steps, random.Random(1)
    real = steps.draft

    def draft(members: Members, *, sampled: bool) -> Drafts:
        drafts = real(members, sampled=sampled)
        ids = drafts.token_ids.clone()
        running = {s.row: s for s in engine.running}
        positions = steps.rows.num_computed[members.index].tolist()
        for r, (row, at) in enumerate(zip(members.index.tolist(), positions, strict=True)):
            if (sequence := running.get(row)) is None:
                continue
            rest = answers[sequence.request.request_id][at + 1 - sequence.num_prompt :]
            for k, token in zip(range(ids.shape[1]), rest, strict=False):
                if rng.random() < hit_rate:
                    ids[r, k] = token
        return replace(drafts, token_ids=ids)

    steps.draft = draft  # type: ignore[method-assign]


def make(pair: tuple[Path, Path], *, graphs: bool, late: bool, **sizes: Any) -> Engine:
    """An engine as on a GPU: replays rounds, takes results in a round late."""
    fields = {"max_num_seqs": 6, "max_num_batched_tokens": 64, **sizes}
    engine = make_engine(*pair, overlap="on" if late else "off", **fields)
    if graphs:
        use_host_graphs(engine)
    return engine


@settings(max_examples=8)
@given(
    place=st.sampled_from(PLACES),
    # twice in a row at first: 3 requests become 1, and 1 again. A lone one may not fail twice, so a
    # round has to succeed in between, and one that is captured makes two calls
    when=st.sets(st.integers(1, 12), min_size=1, max_size=4).filter(
        lambda calls: all(not {n + 1, n + 2} & calls for n in calls - {min(calls)})
    ),
    after=st.booleans(),
    late=st.booleans(),
    graphs=st.booleans(),
    kind=st.sampled_from(["greedy", "sampled"]),
    any_plan=st.booleans(),
)
def test_outputs_are_those_of_an_undisturbed_run(
    pair: tuple[Path, Path],
    wanted: dict[str, dict[str, tuple[int, ...]]],
    place: str,
    when: set[int],
    after: bool,
    late: bool,
    graphs: bool,
    kind: str,
    any_plan: bool,
) -> None:
    engine = make(pair, graphs=graphs or place == "capture", late=late)
    params = {"greedy": GREEDY, "sampled": SAMPLED}[kind]
    if kind == "greedy":
        teach_rows(engine, wanted[kind], 0.7)
        if any_plan:  # which drafts are verified decides which noise a sampled token is made with
            randomise(engine, seed=1)
    trouble = Trouble(engine, place, when, after)
    want = {str(i): wanted[kind][str(i)] for i in range(7)}  # one has to wait in any case
    assert outputs(engine, requests(prompts(10)[:7], params)) == want
    stats = engine.stats
    assert stats.out_of_memory == trouble.raised
    assert stats.output_tokens == sum(len(ids) for ids in want.values())
    assert stats.kv_blocks_used == 0
    if trouble.raised:
        assert (stats.max_num_seqs, stats.max_num_batched_tokens) != (6, 64)


@pytest.mark.parametrize(
    ("kind", "verify", "graphs"),
    [("greedy", "lagged", True), ("greedy", "sync", False), ("sampled", "all", True)],
)
def test_any_allocation_may_fail(
    pair: tuple[Path, Path],
    wanted: dict[str, dict[str, tuple[int, ...]]],
    kind: str,
    verify: VerifyMode,
    graphs: bool,
) -> None:
    """In the middle of a layer, between two writes of KV, while a round is put together.

    Two ops, drawn from the first half of a run's. How many there are differs a little from run to
    run: a failure says which they were.
    """
    params, rng = {"greedy": GREEDY, "sampled": SAMPLED}[kind], random.Random(verify)
    want = {str(i): wanted[kind][str(i)] for i in range(5)}

    def run(when: set[int]) -> FailingOps:
        engine = make(pair, graphs=graphs, late=True, verify=verify, max_num_seqs=4)
        engine.prepare()  # most ops of so short a run
        with FailingOps(when) as ops:
            assert outputs(engine, requests(prompts(10)[:5], params)) == want, when
        assert engine.stats.kv_blocks_used == 0
        return ops

    ops = run(set())
    most = ops.count // 2  # later there is one request left, which may not fail twice in a row
    assert run(set(rng.sample(range(1, most), 2))).raised == 2


def test_sizes_halve_by_what_did_not_fit(
    pair: tuple[Path, Path], wanted: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    """5 of 6 rows ran: 2 at once is half of what failed, and half of 6 may fail again."""
    engine = make(pair, graphs=False, late=False)
    many = requests([p[:3] for p in prompts(5)], GREEDY)
    Trouble(engine, "draft", {1}, late=False)
    want = outputs(engine, many)
    assert (engine.stats.max_num_seqs, engine.stats.max_num_batched_tokens) == (2, 64)
    Trouble(engine, "prefill", {1, 3}, late=False)
    assert outputs(engine, many) == want
    assert (engine.stats.max_num_seqs, engine.stats.max_num_batched_tokens) == (2, 16)
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("verify", ["all", "lagged"])
def test_a_round_that_was_padded_to_what_the_batch_will_be_is_halved_from_there(
    pair: tuple[Path, Path], verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first request in 6 slots, twice, was taken for one that does not fit even alone."""
    many = requests([p[:6] for p in prompts(10) if len(p) >= 6][:6], max_tokens=6)
    want = outputs(make(pair, graphs=False, late=False), many)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 6, "enable_prefix_caching": False}
    engine = make(pair, graphs=True, late=True, verify=verify, **sizes)
    graphs = engine.runner.graphs
    assert graphs is not None
    engine.prepare()
    graphs.clear()
    real, slots = graphs._capture_draft, list[int]()

    def capture(plan: Plan, needs: Needs) -> DraftGraph:
        slots.append(plan.requests)
        if plan.requests > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(plan, needs)

    monkeypatch.setattr(graphs, "_capture_draft", capture)
    assert outputs(engine, many) == want
    assert slots[0] == 6
    assert engine.stats.out_of_memory == 1
    assert engine.stats.max_num_seqs == 3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", ["prefill", "verify"])
def test_a_request_that_does_not_fit_alone_ends_the_run_and_finished_ones_come_out(
    pair: tuple[Path, Path], wanted: dict[str, dict[str, tuple[int, ...]]], place: str, late: bool
) -> None:
    engine = make(pair, graphs=False, late=late)
    teach_rows(engine, wanted["greedy"], 0.9)
    Trouble(engine, place, set(range(12 if place == "verify" else 2, 500)), late=False)
    done: dict[str, tuple[int, ...]] = {}
    run = engine.run(requests(prompts(10), GREEDY))

    def collect() -> None:
        for out in run:
            assert isinstance(out, Completion)
            done[out.request.request_id] = out.token_ids

    with pytest.raises(CapacityError, match=r"request '\d' does not fit into memory even") as info:
        collect()
    assert info.value.exit_code == 1
    assert f"its {'prefill' if place == 'prefill' else 'round'} ran out" in str(info.value)
    assert "Tried to allocate 2 GiB" in str(info.value)
    assert all(wanted["greedy"][i] == ids for i, ids in done.items())
    assert (len(done) > 0) == (place == "verify")
    assert engine.stats.kv_blocks_used == 0


def test_one_shortage_of_a_lone_request_is_not_the_end(
    pair: tuple[Path, Path], wanted: dict[str, dict[str, tuple[int, ...]]]
) -> None:
    engine = make(pair, graphs=False, late=True, max_num_seqs=1)
    Trouble(engine, "verify", {1, 3, 5, 7, 9}, late=True)
    some = {str(i): wanted["greedy"][str(i)] for i in range(3)}
    assert outputs(engine, requests(prompts(10)[:3], GREEDY)) == some
    assert engine.stats.out_of_memory == 5


def test_measuring_wants_the_batch_it_asked_for(pair: tuple[Path, Path]) -> None:
    """A benchmark waited for ever for 6 running requests where 3 were allowed."""
    engine = make(pair, graphs=False, late=False)
    Trouble(engine, "verify", {2}, late=False)
    engine.submit(requests(prompts(6), GREEDY))
    engine.step()
    engine.step()
    with pytest.raises(CapacityError, match="a round of 6 requests does not fit"):
        engine.step()
    engine.abandon()
    assert len(outputs(engine, requests(prompts(3), GREEDY))) == 3


@pytest.mark.parametrize("place", ["draft", "verify", "start", "capture"])
def test_a_shortage_while_costs_are_measured(
    pair: tuple[Path, Path], wanted: dict[str, dict[str, tuple[int, ...]]], place: str
) -> None:
    """Costs of fewer requests are known then; those of more follow in proportion."""
    engine = make_engine(*pair, max_num_seqs=6, verify="lagged")
    graphs = use_host_graphs(engine)
    Trouble(engine, place, {2, 3}, late=False)
    assert outputs(engine, requests(prompts(10), GREEDY)) == wanted["greedy"]
    assert engine.decisions.table is not None
    assert engine.decisions.table.max_requests < 6
    assert graphs.count > 0
    before = dict(engine.stats.seconds)
    assert outputs(engine, requests(prompts(10), GREEDY)) == wanted["greedy"]
    assert engine.stats.seconds["warm-up"] == before["warm-up"], "not measured again"


def test_other_errors_are_not_taken_for_it(pair: tuple[Path, Path]) -> None:
    engine = make(pair, graphs=False, late=False)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.runner.steps.verify = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(engine.run(requests(prompts(3), GREEDY)))


def test_which_errors_mean_it() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    with pytest.raises(RuntimeError, match="allocate") as info:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(info.value)
    end_of_capture = RuntimeError("operation failed due to a previous error during capture")
    end_of_capture.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(end_of_capture)
    assert not is_out_of_memory(RuntimeError("CUDA error: unspecified launch failure"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(None)


@pytest.mark.gpu
@pytest.mark.parametrize(("params", "verify"), [(GREEDY, "lagged"), (SAMPLED, "all")])
def test_a_gpu_that_really_is_full(params: SamplingParams, verify: VerifyMode) -> None:
    """The allocator may take a little more than it holds: less and less of it each time.

    Sampled rows are the same in batches of other sizes where all drafts are verified.
    """
    many = requests([[n % 900 + 8 for n in range(i, i + 150)] for i in range(24)], params)

    def make_demo() -> Engine:
        return Engine(
            EngineConfig(
                model="demo",
                draft="demo",
                device="cuda",
                dtype="float32",
                max_num_seqs=24,
                max_model_len=256,
                kv_cache_memory_bytes=256 << 20,
                verify=verify,
            )
        )

    want = outputs(make_demo(), many)
    total, shortages, too_little = torch.cuda.mem_get_info()[1], 0, list[int]()
    for spare in (512, 192, 96, 48, 24, 12, 6, 2):
        engine = make_demo()
        engine.runner.release()
        allowed = torch.cuda.memory_reserved() + (spare << 20)
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            assert outputs(engine, many) == want
        except CapacityError as error:
            print(f"{spare} MiB: {error}")
            too_little.append(spare)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        stats = engine.stats
        print(f"{spare} MiB: {stats.out_of_memory} shortages, {stats.max_num_seqs} at once")
        shortages += stats.out_of_memory
        del engine
    assert max(too_little, default=0) < 12
    assert shortages > 0
