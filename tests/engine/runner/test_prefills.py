"""Prefills from graphs: padded, in another order, with first tokens and rows. Replayed on a CPU."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import pytest
import torch

from engine import Engine, Request, SamplingParams
from engine.kernels.paged_attention_triton import choose_tile
from engine.runner import prefills
from engine.runner.prefills import Size
from engine.runner.steps import query_bound
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.deepseek_v4 import write_deepseek_v4
from tests.helpers.engines import make_engine, outputs, prompts, randomise, requests, teach
from tests.helpers.host_graphs import use_host_graphs

SHARED = list(range(20, 61))
MANY: dict[str, list[Request]] = {
    "greedy": requests(prompts(12)),
    "sampled": requests(
        prompts(12), SamplingParams(max_tokens=16, temperature=0.9, top_p=0.9, seed=5)
    ),
    "one start": requests([SHARED + p for p in prompts(12, longest=12)]),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "all at once": {"max_num_seqs": 12},
    "in turn": {"max_num_seqs": 3},
    "chunked": {"max_num_batched_tokens": 5, "max_num_seqs": 12},
    "preempted": {
        "max_num_seqs": 12,
        "max_model_len": 80,
        "kv_cache_memory_bytes": 22 * 2 * 4 * 2 * 8 * 4 * (3 + 2),
    },
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "t", "Qwen3ForCausalLM"), write_draft(folder / "d", markov="rnn")


def from_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every prefill be captured at its first use, and none be launched."""
    monkeypatch.setattr(prefills, "_USES", 1)
    use_host_graphs(engine)

    def launched(*_: object) -> None:
        pytest.fail("a prefill was not replayed")

    monkeypatch.setattr(engine.runner, "_prompt", launched)


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_launched_ones(
    pair: tuple[Path, Path], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = MANY[kind]
    want = outputs(make_engine(*pair), many)
    engine = make_engine(*pair, **SETTINGS[name])
    from_graphs(engine, monkeypatch)
    if kind == "greedy":
        teach(engine, want, 0.7)
        randomise(engine, 3)
    assert outputs(engine, many) == want
    graphs = engine.runner.graphs
    assert graphs is not None
    assert graphs.prefills.count > 0
    if name == "preempted":
        assert engine.stats.preemptions > 0
    top = engine.top_logits(many[3].prompt_token_ids)
    plain = make_engine(pair[0]).top_logits(many[3].prompt_token_ids)
    assert [t for t, _ in top] == [t for t, _ in plain]


def test_deepseek_v4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling state is found by rows; padding has the spare one."""
    folder = write_deepseek_v4(tmp_path / "v4")
    many = requests(prompts(8, longest=60), max_tokens=8)
    want = outputs(make_engine(folder), many)
    engine = make_engine(folder, folder, max_num_seqs=3)
    from_graphs(engine, monkeypatch)
    assert outputs(engine, many) == want


def test_a_size_is_captured_once_it_has_come_up_often(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(*pair, max_num_seqs=1, enable_prefix_caching=False)
    graphs = use_host_graphs(engine)
    same = requests([SHARED] * 10, max_tokens=1)
    found: list[bool] = []
    real = graphs.prefills.find

    def find(*given: Any) -> Any:
        found.append((captured := real(*given)) is not None)
        return captured

    monkeypatch.setattr(graphs.prefills, "find", find)
    list(engine.run(same))
    assert found == [False] * 3 + [True] * 7
    assert graphs.prefills.count == 1
    engine.runner.release()
    assert graphs.prefills.count == 0, "the memory of all captured steps can be had back"


def test_a_lost_engines_memory_goes_at_once(pair: tuple[Path, Path]) -> None:
    """Weights in a cycle would stay until the garbage collector comes."""
    engine = make_engine(*pair)
    gone = weakref.ref(use_host_graphs(engine).prefills)
    weights = weakref.ref(engine.runner.net.target)
    gc.disable()
    try:
        del engine
        assert gone() is None
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("width", "ranks", "tokens", "requests", "size"),
    [
        (64, 1, 1, 1, Size(32, 4)),
        (64, 1, 33, 4, Size(64, 4)),
        (64, 1, 2048, 17, Size(2048, 64)),
        (64, 1, 2049, 1, None),
        (64, 1, 100, 65, None),
        (4096, 1, 256, 1, Size(256, 4)),
        (4096, 1, 257, 1, None),
        (4096, 2, 512, 1, Size(512, 4)),
    ],
)
def test_sizes(width: int, ranks: int, tokens: int, requests: int, size: Size | None) -> None:
    """Long prefills of wide layers keep a GPU busy while they are launched."""
    spec = Some(layers=Some(hidden_size=width))
    net = Some(target=Some(spec=spec), ranks=Some(size=ranks), num_owners=1)
    steps: Any = Some(net=net)
    assert prefills.Prefills(steps, steps)._size(tokens, requests) == size


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_prefills_have_one_attention_kernel(
    dtype: torch.dtype, group: int, head_dim: int
) -> None:
    """The rest of a prompt, 10 tokens, met a tile of its own: two seconds of a run."""
    found = set()
    for longest in (1, 10, 21, 22, 42, 43, 200, 300, 2048):
        bound = query_bound(longest)
        assert bound >= longest
        tile = choose_tile(torch.empty(0, head_dim, dtype=dtype), bound * group, 1)
        found.add((tile, bound <= max(tile.block_m, group) // group))
    assert len(found) == 1


def test_padding_is_at_most_a_third() -> None:
    sizes = torch.tensor(prefills._TOKENS).float()
    fewest = sizes[:-1] + 1  # tokens that have the size above
    assert ((sizes[1:] - fewest) / sizes[1:])[1:].max() <= 1 / 3
