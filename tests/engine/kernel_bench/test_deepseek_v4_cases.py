"""DeepSeek-V4's ops in `bench kernels`: right at small sizes, and refused when they are not."""

from dataclasses import replace

import pytest
import torch

from engine import EngineConfig
from engine.kernel_bench import bench, deepseek_v4_cases, timing
from engine.kernel_bench.bench import Sizes, measure, prepare
from engine.kernel_bench.deepseek_v4_cases import experts_case
from engine.kernel_bench.timing import Ceiling
from engine.models.deepseek_v4_shapes import V4_TARGETS
from engine.models.deepseek_v4_spec import V4Layers
from engine.models.layers import Placement

CEILING = Ceiling(copy=1e9, matmul=1e9)
SIZES = Sizes(requests=(2,), context=40)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_CPU_SECONDS", 0.0)
    monkeypatch.setattr(bench, "measure_ceiling", lambda _: CEILING)


def small() -> V4Layers:
    layers = V4_TARGETS["deepseek-v4-flash"].layers
    return replace(
        layers,
        hidden_size=128,
        num_heads=4,
        head_dim=32,
        q_rank=128,
        o_groups=2,
        o_rank=128,
        window=16,
        heavy_ratio=16,
        experts=replace(layers.experts, num_experts=8, per_token=2, width=64),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ops_are_right_and_timed(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    spec = replace(V4_TARGETS["deepseek-v4-flash-4"], layers=small())
    monkeypatch.setitem(V4_TARGETS, "tiny", spec)
    name = "shape:tiny"
    made = prepare(EngineConfig(model=name, draft=name, device="cpu", dtype=dtype), SIZES)
    found = list(made.run())
    assert [m.op for m in found] == [
        *("experts", "packed_linear", "packed_linear"),
        *("hc_mix", "hc_post", "hc_collapse", "window_attention"),
    ]
    for row in found:
        assert row.wrong is None, row
        assert row.seconds > 0
    # 12 tokens that choose 2 of 8: 97 % of 24,576 numbers each, fp4, and what goes in and out
    want = 8 * (1 - 0.75**12) * 3 * 64 * 128 * (0.5 + 1 / 32)
    size = 4 if dtype == "float32" else 2
    assert found[0].nbytes == pytest.approx(want + 2 * 12 * 3 * 128 * size)
    assert "2 x 6 tokens, window 16, 10 entries" in found[-1].shape


def test_wrong_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Placement(torch.float32, torch.device("cpu"))
    right = deepseek_v4_cases.run_experts
    monkeypatch.setattr(deepseek_v4_cases, "run_experts", lambda *a, **k: right(*a, **k) * 1.01)
    assert "y is off by" in str(measure(experts_case(5, small(), at), at, CEILING).wrong)
