"""DeepSeek-V4 on CUDA devices. Run by hand there: pytest -m "gpu or multi_gpu"."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.kernels.wide_linear import WideLinear
from tests.helpers.deepseek_v4 import write_deepseek_v4
from tests.helpers.deepseek_v41 import write_deepseek_v41
from tests.helpers.engines import make_engine, outputs, prompts, randomise, requests, teach


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [None, "fp4"])
@pytest.mark.parametrize("version", ["V4", "V4.1"])
def test_float32_tokens_are_the_cpus(tmp_path: Path, version: str, packed: str | None) -> None:
    """Plain, drafted, from graphs and without, in small chunks, with any plan."""
    released: dict[str, Any] = {"names": "released", "heavy": 128, "packed": packed}
    if version == "V4":
        folder = write_deepseek_v4(tmp_path / "v4", **(released if packed else {}))
    else:
        folder = write_deepseek_v41(tmp_path / "v41", packed=packed is not None)
    many = requests(prompts(8, longest=60))
    want = outputs(make_engine(folder), many)
    how: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
    assert outputs(make_engine(folder, **how), many) == want
    for settings in (
        {"max_num_seqs": 1},
        {"max_num_seqs": 8},
        {"max_num_batched_tokens": 5},
        {"enforce_eager": True},
    ):
        engine = make_engine(folder, folder, **how, **settings)
        teach(engine, want, 0.7)
        assert outputs(engine, many) == want, settings
    engine = make_engine(folder, folder, **how, max_num_seqs=6)
    for seed in range(2):
        randomise(engine, seed)
        assert outputs(engine, many) == want


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["shape:deepseek-v4-flash-4", "shape:deepseek-v4.1-flash-4"])
def test_a_slice_at_real_widths_runs_in_bfloat16(name: str) -> None:
    """Four layers and the drafter, packed: rounds end, and a request's tokens are its own."""
    config = EngineConfig(
        model=name, draft=name, device="cuda", max_num_seqs=4, max_model_len=512, verify="all"
    )
    engine = Engine(config)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    many = [
        Request(request_id=str(i), prompt_token_ids=tuple(range(5 + i, 150 + i)), params=params)
        for i in range(4)
    ]
    together = outputs(engine, many)
    assert all(len(ids) == 24 for ids in together.values())
    # rows have the same bits in any batch where no product depends on who else is in it
    same = sum(outputs(engine, [one])[one.request_id] == together[one.request_id] for one in many)
    print(f"{same} of 4 are the same alone")


@pytest.mark.multi_gpu
def test_two_gpus_give_what_one_gives(tmp_path: Path) -> None:
    folder = write_deepseek_v4(tmp_path / "v4")
    many = requests(prompts(8, longest=60))
    want = outputs(make_engine(folder), many)
    for loop in ("on", "off"):
        engine = make_engine(
            folder,
            folder,
            device="cuda",
            dtype="float32",
            tensor_parallel_size=2,
            sharded_loop=loop,
        )
        assert outputs(engine, many) == want
        engine.close()


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"sharded_loop": "on"},
        {"sharded_loop": "off", "enforce_eager": True},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {},
    ],
    ids=["on", "eager", "chunked", "one", "any_plan"],
)
def test_two_gpus_that_share_requests_give_what_one_gives(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """From graphs and without; more of one GPU's than of the other's, and none; any plan."""
    folder = write_deepseek_v4(tmp_path / "v4")
    ids = prompts(6, longest=60)
    # the first and every second one after it are one GPU's, and outlive the others
    many = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(p),
            params=SamplingParams(max_tokens=3 if i % 2 else 24),
        )
        for i, p in enumerate(ids)
    ]
    want = outputs(make_engine(folder, max_num_seqs=6), many)
    how: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "attention_parallel": "data",
        "max_num_seqs": 6,
        "audit": True,
    }
    engine = make_engine(folder, folder, **{**how, **settings})
    if not settings:
        randomise(engine, 1)
    assert outputs(engine, many) == want
    engine.close()


@pytest.mark.gpu
def test_products_that_are_float32_of_bfloat16_inputs() -> None:
    x, weight = (torch.randn(n, 512, device="cuda").bfloat16() for n in (7, 96))
    got = WideLinear(weight)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ weight.float().t(), atol=1e-3, rtol=1e-4)
