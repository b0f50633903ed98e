"""Two GPUs give what one gives. Run by hand: pytest -m multi_gpu."""

from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig
from tests.engine.test_cuda import plain_tokens
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine, outputs, prompts, requests

pytestmark = pytest.mark.multi_gpu


def demo(size: int, **settings: Any) -> Engine:
    fields = {"model": "demo", "draft": "demo", "device": "cuda", "dtype": "float32"}
    fields |= {"max_num_seqs": 16, "max_model_len": 512, "tensor_parallel_size": size}
    return Engine(EngineConfig(**{**fields, **settings}))


@pytest.mark.parametrize(
    "settings",
    [
        {"sharded_loop": "on"},
        {"sharded_loop": "off"},
        {"sharded_loop": "on", "max_num_seqs": 1},
        {"sharded_loop": "on", "enforce_eager": True, "max_num_seqs": 7},
        {"sharded_loop": "on", "all_reduce": "nccl"},
        {"sharded_loop": "on", "overlap": "off", "audit": True},
        {"sharded_loop": "off", "verify": "sync", "audit": True},
    ],
    ids=["on", "off", "one", "eager", "nccl", "one_by_one", "sync"],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}])
def test_demo_pair(sampling: dict[str, Any], settings: dict[str, Any]) -> None:
    """float32, 64 prompts, from captured rounds: sharded and replicated, uneven batches.

    Sampled rows are the same in any batch where all drafts are verified, and only there.
    """
    if sampling:
        settings = {**settings, "verify": "all"}
    many = requests([plain_tokens(i) for i in range(64)], max_tokens=96, **sampling)
    want = outputs(demo(1, verify=settings.get("verify", "lagged")), many)
    engine = demo(2, **settings)
    got = outputs(engine, many)
    same = sum(got[i] == want[i] for i in want)
    print(f"{settings}: {same} of 64 equal, AL {engine.stats.acceptance_length:.2f}")
    engine.close()
    assert same == 64


@pytest.mark.parametrize("loop", ["on", "off"])
def test_preemption_and_teaching(tmp_path: Path, loop: str) -> None:
    """Random networks: a CPU's tokens, on two GPUs, in a cache that one request nearly fills."""
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d", markov="rnn")
    want = outputs(make_engine(target), requests(prompts(12)))
    per_block = 2 * 4 * 1 * 8 * 4 * (3 + 2)
    engine = make_engine(
        target,
        draft,
        device="cuda",
        dtype="float32",
        max_num_seqs=12,
        max_model_len=64,
        kv_cache_memory_bytes=24 * per_block,
        tensor_parallel_size=2,
        sharded_loop=loop,
    )
    assert outputs(engine, requests(prompts(12))) == want
    assert engine.stats.preemptions > 0
    engine.close()
