"""The same engine on a CUDA device. Run by hand there: pytest -m gpu."""

from pathlib import Path

import pytest

from engine import Engine, EngineConfig, Request, SamplingParams
from engine.runner import prefills
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import (
    complete,
    make_engine,
    outputs,
    prompts,
    randomise,
    requests,
    teach,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_float32_tokens_are_the_cpus(tmp_path: Path, family: str) -> None:
    """Random logits of 128 tokens: a tie closer than float32's rounding has odds of about 1e-4."""
    target = write_target(tmp_path / "t", f"{family}ForCausalLM")
    draft = write_draft(tmp_path / "d", markov="rnn")
    want = outputs(make_engine(target), requests(prompts(8)))
    for settings in ({"max_num_seqs": 1}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 5}):
        engine = make_engine(target, draft, device="cuda", dtype="float32", **settings)
        teach(engine, want, 0.7)
        assert outputs(engine, requests(prompts(8))) == want


@pytest.mark.parametrize("hot", [False, True])
def test_captured_prefills_give_the_cpus_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hot: bool
) -> None:
    """Every one replayed from its first use on: several sizes, chunks, shared starts."""
    monkeypatch.setattr(prefills, "_USES", 1)
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d")
    params = SamplingParams(max_tokens=20, temperature=0.9 if hot else 0.0, top_p=0.9, seed=5)
    many = requests([list(range(20, 61)) + p for p in prompts(12)], params)
    cpu = make_engine(target, draft)
    want, prefix = outputs(cpu, many), many[3].prompt_token_ids
    top = [token for token, _ in cpu.top_logits(prefix)]
    for settings in ({"max_num_seqs": 1}, {"max_num_seqs": 8}, {"max_num_batched_tokens": 5}):
        engine = make_engine(target, draft, device="cuda", dtype="float32", **settings)
        assert outputs(engine, many) == want
        # rounds after it share the memory of the prefill
        assert [token for token, _ in engine.top_logits(prefix)] == top
        assert engine.runner.graphs is not None
        assert engine.runner.graphs.prefills.count > 0


def test_sampled_rows_are_the_cpus_and_independent_of_the_batch(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d")
    many = requests(prompts(8), SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=5))
    want = outputs(make_engine(target, draft), many)
    for seqs in (1, 8):
        engine = make_engine(target, draft, device="cuda", dtype="float32", max_num_seqs=seqs)
        assert outputs(engine, many) == want


@pytest.mark.parametrize("eager", [False, True])
def test_any_plan_gives_the_cpus_tokens(tmp_path: Path, eager: bool) -> None:
    """Ragged rounds in graphs of any tier, replayed with another geometry every time."""
    target = write_target(tmp_path / "t", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "d")
    want = outputs(make_engine(target), requests(prompts(12)))
    engine = make_engine(
        target, draft, device="cuda", dtype="float32", max_num_seqs=6, enforce_eager=eager
    )
    for seed in range(3):
        randomise(engine, seed)
        assert outputs(engine, requests(prompts(12))) == want
    done = engine.stats.schedule
    assert min(done.rounds.values()) > 5
    assert done.captures == 0 if eager else done.captures > 3
    assert (done.eager > 0) == eager


@pytest.mark.parametrize("mode", ["lagged", "sync"])
def test_scheduled_rounds_give_plain_output(mode: str) -> None:
    """The demo pair in float32 with measured costs, at several batch sizes."""
    config = EngineConfig(
        model="demo", draft="demo", device="cuda", dtype="float32", max_num_seqs=32
    )
    engine = Engine(config)
    many = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(plain_tokens(i % 16)),
            params=SamplingParams(max_tokens=60),
        )
        for i in range(40)
    ]
    want = {c.request.request_id: c.token_ids for c in engine.run(many, speculate=False)}
    for width in (1, 8, 32):
        ran = engine.run(many[: 2 * width], verify=mode, max_num_seqs=width)
        got = {c.request.request_id: c.token_ids for c in ran}
        assert got == {i: want[i] for i in got}
    for seed in range(2):
        randomise(engine, seed)
        got = {c.request.request_id: c.token_ids for c in engine.run(many, verify=mode)}
        assert got == want
    table = engine.decisions.table
    assert table is not None
    assert table.max_requests == 32
    print(table.to_json(), engine.stats.schedule)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_demo_pair(dtype: str) -> None:
    """Drafted equals plain but for near ties of the low dtypes; acceptance stays."""
    many = [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(plain_tokens(i)),
            params=SamplingParams(max_tokens=160),
        )
        for i in range(16)
    ]
    both = []
    for draft in ("demo", None):
        engine = Engine(
            EngineConfig(model="demo", draft=draft, device="cuda", dtype=dtype, max_num_seqs=16)
        )
        both.append({i: c.text for i, c in complete(engine, many).items()})
        if draft:
            assert engine.stats.acceptance_length > 3.5
    same = sum(both[0][i] == both[1][i] for i in both[0])
    print(f"{dtype}: {same} of 16 outputs equal")
    assert same >= (16 if dtype == "float32" else 12)


def plain_tokens(i: int) -> list[int]:
    import json
    from importlib.resources import files

    from engine.text import Tokenizer

    folder = Path(str(files("dspark_demo")))
    rows = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = Tokenizer.load(folder / "target")
    return tokenizer.encode_chat([{"role": "user", "content": json.loads(rows[i])["question"]}])
