"""An op that is wrong is refused, not timed; one that is right is held to what it must move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, EngineConfig
from engine.kernel_bench import attention_cases, choice_cases, index_cases, layer_cases, timing
from engine.kernel_bench import bench as bench_module
from engine.kernel_bench.attention_cases import Asked, attention_case
from engine.kernel_bench.bench import Sizes, measure, prepare
from engine.kernel_bench.case import Case, as_good_as, equal
from engine.kernel_bench.choice_cases import accept_case, markov_case, sample_case
from engine.kernel_bench.index_cases import (
    slot_mapping_case,
    step_inputs_case,
    write_blocks_case,
)
from engine.kernel_bench.layer_cases import (
    activation_case,
    gated_case,
    linear_case,
    norm_case,
    rope_product_case,
    rope_store_case,
)
from engine.kernel_bench.timing import Ceiling
from engine.models.draft_config import parse_draft
from engine.models.layers import Placement
from engine.models.target_config import parse_target
from tests.helpers.checkpoints import write_draft, write_target

CEILING = Ceiling(copy=1e9, matmul=1e9)
SMALL = Sizes(requests=(1, 3), context=9, long_requests=4, long_context=20, prefill=70)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0.0)  # three calls each, whatever they take


@pytest.fixture(params=["float32", "bfloat16"])
def at(request: pytest.FixtureRequest) -> Placement:
    return Placement(getattr(torch, request.param), torch.device("cpu"))


@pytest.fixture
def cases(tmp_path: Path, at: Placement) -> dict[str, Callable[[], Case]]:
    target = parse_target(write_target(tmp_path / "t", "Qwen3ForCausalLM"))
    draft = parse_draft(write_draft(tmp_path / "d"))
    spec, vocab = target.layers, target.vocab_size
    return {
        "attention": lambda: attention_case(Asked(3, 9, 5), spec, at),
        "draft attention": lambda: attention_case(Asked(3, 9, 5, causal=False), spec, at),
        "prefill": lambda: attention_case(Asked(1, 0, 70), spec, at),
        "linear": lambda: linear_case("x", 5, 32, 48, at),
        "gated_linear": lambda: gated_case(5, spec, at),
        "add_rms_norm": lambda: norm_case(5, spec, at),
        "silu_mul": lambda: activation_case(5, spec, at),
        "rope_product": lambda: rope_product_case(5, spec, at),
        "rope_store": lambda: rope_store_case(5, spec, at),
        "markov_chain": lambda: markov_case(3, 4, draft, at),
        "accept": lambda: accept_case(5, 4, vocab, at),
        "sample": lambda: sample_case(5, vocab, at),
        "step_inputs": lambda: step_inputs_case(3, 5, at.device),
        "slot_mapping": lambda: slot_mapping_case(3, 5, 9, at.device),
        "write_blocks": lambda: write_blocks_case(3, at.device),
    }


def off_by_a_little(out: torch.Tensor) -> torch.Tensor:
    """A floating value a hundredth off, or an integer that is another one."""
    wrong = out.clone()
    flat = wrong.view(-1)
    flat[-1] = flat[-1] + (1 if not out.is_floating_point() else 0.05 * out.abs().max())
    return wrong


BROKEN: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "attention": (attention_cases, "paged_attention", off_by_a_little),
    "draft attention": (attention_cases, "paged_attention", off_by_a_little),
    "prefill": (attention_cases, "paged_attention", off_by_a_little),
    "linear": (layer_cases.Linear, "__call__", off_by_a_little),
    "gated_linear": (layer_cases.Linear, "gated", off_by_a_little),
    "add_rms_norm": (layer_cases, "add_rms_norm", lambda o: (off_by_a_little(o[0]), o[1])),
    "silu_mul": (layer_cases, "silu_mul", off_by_a_little),
    "rope_product": (layer_cases, "rope_product", off_by_a_little),
    "rope_store": (layer_cases, "rope_store", off_by_a_little),
    "markov_chain": (
        choice_cases,
        "markov_chain",
        lambda o: type(o)((o.token_ids + 1) % 100, o.logits, o.prev_embeds),
    ),
    "accept": (
        choice_cases,
        "accept",
        lambda o: type(o)(o.token_ids, off_by_a_little(o.num_committed), o.finite),
    ),
    "sample": (choice_cases, "sample", lambda o: (o + 1) % 100),
    "step_inputs": (
        index_cases,
        "step_inputs",
        lambda o: o._replace(positions=off_by_a_little(o.positions)),
    ),
    "slot_mapping": (index_cases, "slot_mapping", off_by_a_little),
    "write_blocks": (index_cases, "written", off_by_a_little),
}


@pytest.mark.parametrize("name", BROKEN)
def test_right_ops_are_timed(
    name: str, cases: dict[str, Callable[[], Case]], at: Placement
) -> None:
    got = measure(cases[name](), at, CEILING)
    assert got.wrong is None
    assert got.seconds > 0
    least = max(got.nbytes / 1e9, got.flops / 1e9)
    assert got.share == pytest.approx(least / got.seconds)
    assert got.by_flops == (got.flops > got.nbytes)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ops_are_refused(
    name: str,
    cases: dict[str, Callable[[], Case]],
    at: Placement,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, attribute, spoil = BROKEN[name]
    real, calls = getattr(owner, attribute), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return spoil(real(*args, **kwargs))

    monkeypatch.setattr(owner, attribute, broken)
    got = measure(cases[name](), at, CEILING)
    assert got.wrong is not None
    assert calls == [1], "it was timed"
    assert (got.seconds, got.share) == (0.0, 0.0)


def test_what_an_op_stores_is_checked_too(
    cases: dict[str, Callable[[], Case]], at: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = layer_cases.rope_store

    def forgets_v(*args: Any) -> torch.Tensor:
        before = args[6].clone()
        out = real(*args)
        args[6].copy_(before)
        return out

    monkeypatch.setattr(layer_cases, "rope_store", forgets_v)
    wrong = measure(cases["rope_store"](), at, CEILING).wrong
    assert wrong is not None
    assert wrong.startswith("stored v is off by ")


def test_nan_and_other_shapes_are_wrong() -> None:
    x = torch.ones(3)
    assert as_good_as("x", x, x, x) is None
    assert "off by nan" in str(as_good_as("x", x * float("nan"), x, x))
    assert "expected torch.bfloat16" in str(as_good_as("x", x, x, x.bfloat16()))
    assert as_good_as("x", x[:2], x, x) is not None
    assert as_good_as("x", x + 2e-5, x, x) is not None
    assert equal("x", x, x) is None
    assert equal("x", torch.tensor([1.0, 2.0, 1.0]), x) == "1 of 3 values of x differ"


def test_bytes_and_flops_are_those_of_the_formulas(at: Placement, tmp_path: Path) -> None:
    spec = parse_target(write_target(tmp_path / "t", "Qwen3ForCausalLM")).layers
    item, heads, kv, dim = at.dtype.itemsize, spec.num_heads, spec.num_kv_heads, spec.head_dim
    case = attention_case(Asked(2, 10, 3), spec, at)
    assert case.nbytes == item * dim * (2 * 2 * 13 * kv + 2 * 6 * heads)
    seen = 2 * (11 + 12 + 13)  # keys of each query
    assert case.flops == 4 * seen * heads * dim
    assert attention_case(Asked(2, 10, 3, causal=False), spec, at).flops == 4 * 78 * heads * dim
    assert linear_case("x", 5, 32, 48, at).flops == 2 * 5 * 32 * 48
    gated, both = gated_case(5, spec, at), 2 * spec.intermediate_size
    alone = linear_case("x", 5, spec.hidden_size, both, at)
    assert gated.flops == alone.flops
    assert gated.nbytes == alone.nbytes - 5 * spec.intermediate_size * item


def test_a_bench_has_the_rows_that_count(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_target(tmp_path / "t", "Qwen3ForCausalLM")),
        draft=str(write_draft(tmp_path / "d")),
        device="cpu",
        threads=1,
    )
    bench = prepare(config, SMALL)
    rows = list(bench.run())
    assert all(m.wrong is None for m in rows)
    assert {m.op for m in rows} == {name for name in BROKEN if " " not in name} - {"prefill"}
    shapes = [m.shape for m in rows if m.op == "attention"]
    assert shapes[:3] == ["4 x (20 + 5) causal", "4 x (20 + 1) causal", "1 x (0 + 70) causal"]
    assert "3 x (9 + 5) both ways" in shapes
    assert len({(m.op, m.shape) for m in rows}) == len(rows)
    assert {m.op for m in bench.run(frozenset({"sample"}))} == {"sample"}
    with pytest.raises(ConfigError, match="no op 'smaple'"):
        bench.run(frozenset({"smaple"}))  # before any is measured
    assert "references" in bench.about()["path"]
    assert Sizes().prefill == 8192
    assert (Sizes().long_requests, Sizes().long_context) == (64, 2048)


def test_no_prompt_is_longer_than_the_model_takes(tmp_path: Path) -> None:
    """8,192 tokens took a CPU 10 s a call, of a model that holds 2,048."""
    folder = write_target(tmp_path / "t", "Qwen3ForCausalLM", max_position=48)
    bench = prepare(EngineConfig(model=str(folder), device="cpu", threads=1), SMALL)
    shapes = [m.shape for m in bench.run(frozenset({"attention"}))]
    assert "1 x (0 + 48) causal" in shapes


def test_a_cpu_takes_the_threads_an_engine_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of two busy cores made every op wait for the scheduler: 8 ms for 0.1."""
    config = EngineConfig(model=str(write_target(tmp_path / "t", "Qwen3ForCausalLM")), device="cpu")
    before, took = torch.get_num_threads(), []
    monkeypatch.setattr(bench_module, "usable_cores", lambda: 7)
    for answer in (1, 7):
        monkeypatch.setattr(bench_module, "faster_threads", lambda *given, n=answer: n)
        try:
            prepare(config, SMALL)
            took.append(torch.get_num_threads())
        finally:
            torch.set_num_threads(before)
    assert took == [1, 7]


@pytest.mark.gpu
def test_every_op_of_the_8b_shape_is_right_on_a_gpu() -> None:
    config = EngineConfig(model="shape:qwen3-8b", draft="shape:qwen3-8b", device="cuda")
    sizes = Sizes(requests=(1, 16), long_context=512, prefill=1024)
    wrong = {(m.op, m.shape): m.wrong for m in prepare(config, sizes).run() if m.wrong is not None}
    assert wrong == {}
