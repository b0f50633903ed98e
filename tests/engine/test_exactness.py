"""The exactness rules of the engine: tiny random networks, float32, token for token.

Rule numbers are those of the design: 1 greedy equality, 2 keyed noise, 5 ends, 7 inert padding.
Rule 3 is in kernels/test_acceptance.py, rule 6 in test_draft_semantics.py.
"""

import os
import random
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import (
    Completion,
    ConfigError,
    DSparkError,
    Engine,
    FinishReason,
    Request,
    RequestError,
    RequestFailure,
    SamplingParams,
)
from engine.kernels.acceptance import Drafts
from engine.runner.batch import Members
from engine.sequence import Sequence
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.drafts import EOS
from tests.helpers.engines import (
    complete,
    make_engine,
    outputs,
    prompts,
    record_drafts,
    requests,
    teach,
)
from tests.helpers.reference import PlainTarget

ARCHITECTURES = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama tied, llama3 rope": {
        "architecture": "LlamaForCausalLM",
        "tied": True,
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama with every bias": {
        "architecture": "LlamaForCausalLM",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return (
        write_target(folder / "target", "Qwen3ForCausalLM"),
        write_draft(folder / "draft"),
    )


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> dict[str, tuple[int, ...]]:
    """Plain greedy outputs of 12 prompts, one at a time."""
    return outputs(make_engine(pair[0], max_num_seqs=1), requests(prompts(12)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rule_1_plain_greedy_is_the_references(tmp_path: Path, name: str) -> None:
    target = write_target(tmp_path, **ARCHITECTURES[name])  # type: ignore[arg-type]
    many = prompts(3, seed=5)
    got = outputs(make_engine(target), requests(many))
    reference = PlainTarget(target)
    for i, prompt in enumerate(many):
        assert list(got[str(i)]) == reference.greedy(prompt, 24, (EOS,))


VARIATIONS = {
    "one at a time": {"max_num_seqs": 1},
    "batched": {},
    "wide": {"max_num_seqs": 12},
    "chunked prefill": {"max_num_batched_tokens": 5},
    "chunks and blocks meet": {"max_num_batched_tokens": 8, "max_num_seqs": 12},
    "no prefix cache": {"enable_prefix_caching": False},
    "large blocks": {"kv_block_size": 64},
    "shorter drafts": {"num_speculative_tokens": 2},
    "one draft": {"num_speculative_tokens": 1},
    "two threads": {"threads": 2},
}


# drafts that are never, mostly and always right; DSPARK_FULL: each with every variation
PLAYED = [(name, rate) for name in VARIATIONS for rate in (0.0, 0.8, 1.0)]
if "DSPARK_FULL" not in os.environ:
    EVERY_RATE = ("batched", "chunked prefill")
    PERFECT = ("shorter drafts", "one draft", "two threads")
    PLAYED = [
        (name, rate)
        for name, rate in PLAYED
        if name in EVERY_RATE or rate == (1.0 if name in PERFECT else 0.8)
    ]


@pytest.mark.parametrize(("name", "hit_rate"), PLAYED)
def test_rule_1_drafted_greedy_is_plain_greedy(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], name: str, hit_rate: float
) -> None:
    engine = make_engine(*pair, **VARIATIONS[name])  # type: ignore[arg-type]
    teach(engine, plain, hit_rate)
    assert outputs(engine, requests(prompts(12))) == plain
    if hit_rate == 1.0:
        gamma = engine.config.num_speculative_tokens or 4
        full = engine.stats.accepted_at
        assert full == engine.stats.drafted_at, "a perfect draft is never rejected"
        assert engine.stats.acceptance_length > min(gamma, 3)


def test_rule_1_any_batch_order(pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]) -> None:
    engine = make_engine(*pair)
    teach(engine, plain, 0.7)
    assert outputs(engine, requests(prompts(12))[::-1]) == plain
    order = [5, 0, 11, 3, 7, 1, 10, 2, 9, 4, 8, 6]
    many = requests(prompts(12))
    assert outputs(engine, [many[i] for i in order]) == plain


@pytest.mark.parametrize("blocks", [18, 20, 26])
def test_rule_1_preemption(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], blocks: int
) -> None:
    """A cache that one request nearly fills: the youngest give way, and nothing changes."""
    per_block = 2 * 4 * 2 * 8 * 4 * (3 + 2)  # K and V, tokens, heads, dim, bytes, layers
    engine = make_engine(
        *pair, max_num_seqs=12, max_model_len=64, kv_cache_memory_bytes=blocks * per_block
    )
    assert engine.limits.num_blocks == blocks
    teach(engine, plain, 0.6)
    assert outputs(engine, requests(prompts(12))) == plain
    assert engine.stats.preemptions > 0


def test_rule_1_prefix_reuse(pair: tuple[Path, Path]) -> None:
    """Shared prefixes, whole prompts repeated, and prompts that end inside or at a block."""
    stem = prompts(1, seed=9, longest=40)[0]
    stem = (stem * 40)[:37]
    many = [stem[:n] for n in (37, 37, 36, 35, 33, 32, 31, 5, 4, 37)]
    many += [[*stem[:20], 7, 8, 9], [*stem[:32], 50]]
    want = outputs(
        make_engine(pair[0], max_num_seqs=1, enable_prefix_caching=False), requests(many)
    )
    for seqs in (1, 3):
        engine = make_engine(*pair, max_num_seqs=seqs)
        teach(engine, want, 0.7)
        for _ in range(2):
            done = complete(engine, requests(many))
            assert {i: c.token_ids for i, c in done.items()} == want
        # the second time every full block but the last token's is found
        assert done["0"].num_cached_tokens == 36
        assert done["6"].num_cached_tokens == 28


def test_rule_1_engine_is_as_new_after_an_early_close(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(*pair)
    run = engine.run(requests(prompts(12)))
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert engine.stats.kv_blocks_used == 0
    assert outputs(engine, requests(prompts(12))) == plain


def test_requests_may_be_made_from_results(pair: tuple[Path, Path]) -> None:
    """None keeps a run alive for a follow-up; nobody is left to wait for it: an error, no loop."""
    engine, asked, ready = make_engine(*pair, max_num_seqs=2), requests(prompts(3)), []
    going = len(asked)

    def source() -> Iterator[Request | None]:
        yield from asked
        while going or ready:
            yield ready.pop() if ready else None

    done = {}
    for out in engine.run(source()):
        assert isinstance(out, Completion)
        name, ids = out.request.request_id, out.request.prompt_token_ids + out.token_ids
        done[name] = out
        if "+" in name:
            going -= 1
        else:
            ready.append(replace(out.request, request_id=name + "+", prompt_token_ids=ids))
    assert sorted(done) == ["0", "0+", "1", "1+", "2", "2+"]
    assert done["0+"].num_cached_tokens > 0
    follow_ups = [c.request for name, c in done.items() if "+" in name]
    assert outputs(make_engine(*pair), follow_ups) == {
        r.request_id: done[r.request_id].token_ids for r in follow_ups
    }
    with pytest.raises(DSparkError, match="waits for results"):
        list(engine.run([asked[0], None, None, *[None] * 99]))
    assert engine.stats.kv_blocks_used == 0
    assert [c.request for c in engine.run([None][:0])] == []


SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=3)


def test_rule_2_sampled_output_does_not_depend_on_the_batch(pair: tuple[Path, Path]) -> None:
    many = requests(prompts(8), SAMPLED)
    want = outputs(make_engine(*pair, max_num_seqs=1), many)
    assert outputs(make_engine(*pair, max_num_seqs=8), many[::-1]) == want
    assert outputs(make_engine(*pair, max_num_seqs=3, max_num_batched_tokens=7), many) == want
    mixed = many + [
        Request(request_id=f"g{i}", prompt_token_ids=tuple(p), params=SamplingParams(max_tokens=9))
        for i, p in enumerate(prompts(4, seed=2))
    ]
    among_greedy = outputs(make_engine(*pair, max_num_seqs=5), mixed)
    assert {i: among_greedy[i] for i in want} == want


def test_rule_2_seed_id_and_sample_each_change_the_output(pair: tuple[Path, Path]) -> None:
    """Equal prompts, 20 near-uniform tokens: equal outputs by chance have odds < 1e-20."""
    prompt = tuple(prompts(1)[0])
    hot = SamplingParams(max_tokens=20, temperature=5.0)
    other = SamplingParams(max_tokens=20, temperature=5.0, seed=1)
    many = [
        Request(request_id="a", prompt_token_ids=prompt, params=hot),
        Request(request_id="b", prompt_token_ids=prompt, params=hot),
        Request(request_id="c", prompt_token_ids=prompt, params=hot, sample_index=1),
        Request(request_id="d", prompt_token_ids=prompt, params=other),
    ]
    assert len(set(outputs(make_engine(*pair), many).values())) == 4


@pytest.mark.parametrize("hit_rate", [0.0, 1.0])
def test_rule_5_limits_are_exact(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], hit_rate: float
) -> None:
    """max_tokens and the context's end, at every offset in a block."""
    engine = make_engine(*pair, max_num_seqs=3)
    teach(engine, plain, hit_rate)
    for limit in range(1, 13):
        done = complete(engine, requests(prompts(4), SamplingParams(max_tokens=limit)))
        for i, c in done.items():
            assert c.token_ids == plain[i][:limit]
            assert sum(r.committed for r in c.rounds) <= limit - 1
            ended = EOS in c.token_ids
            assert (c.finish_reason is FinishReason.LENGTH) == (not ended)
    prompt = prompts(12)[11]
    for room in range(1, 11):
        small = make_engine(*pair, max_model_len=len(prompt) + room)
        teach(small, {"0": plain["11"]}, hit_rate)
        (c,) = complete(small, requests([prompt])).values()
        assert c.token_ids == plain["11"][:room]


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 1.0])
def test_rule_5_counts_describe_the_kept_tokens(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], hit_rate: float
) -> None:
    """A stop token at any offset of an accepted block: what follows it is nowhere."""
    engine = make_engine(*pair)
    teach(engine, plain, hit_rate)
    for at in range(1, 20):
        stop = plain["3"][at]
        first = plain["3"].index(stop)
        params = SamplingParams(max_tokens=24, stop_token_ids=(stop,))
        (c,) = complete(engine, [requests(prompts(12), params)[3]]).values()
        assert c.token_ids == plain["3"][: first + 1]
        assert (c.finish_reason, c.stop_reason) == (FinishReason.STOP, stop)
        assert 1 + sum(r.committed for r in c.rounds) == len(c.token_ids)
        for r in c.rounds:
            assert 0 <= r.accepted <= r.drafted
            assert r.committed in (r.accepted, r.accepted + 1)


def test_statistics_add_up(pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]) -> None:
    engine = make_engine(*pair)
    teach(engine, plain, 0.7)
    done = complete(engine, requests(prompts(12))).values()
    rounds = [r for c in done for r in c.rounds]
    stats = engine.stats
    assert stats.rounds == len(rounds)
    assert stats.drafted == sum(r.drafted for r in rounds) == sum(stats.drafted_at)
    assert stats.accepted == sum(r.accepted for r in rounds) == sum(stats.accepted_at)
    assert stats.committed == sum(r.committed for r in rounds)
    assert stats.output_tokens == sum(len(c.token_ids) for c in done)
    assert all(a <= d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True))


def test_rule_7_stale_cache_contents_are_inert(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    """Every slot of both caches starts as garbage: only written slots are ever read."""
    engine = make_engine(*pair)
    net = engine.runner.net
    assert net.draft_kv is not None
    for kv in (net.target_kv, net.draft_kv):
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
    teach(engine, plain, 0.7)
    assert outputs(engine, requests(prompts(12))) == plain


@pytest.mark.parametrize("at", ["prefill", "verify"])
def test_a_row_whose_logits_are_not_finite_fails_alone(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], at: str
) -> None:
    """Overflow in a low dtype once filled a batch with token 0 until max_tokens."""
    engine = make_engine(*pair)
    steps, target = engine.runner.steps, engine.runner.net.target
    running: list[Items[Sequence]] = []
    real_forward, real_step = target.forward, getattr(steps, at)

    def step(members: Members, *rest: Any, **flags: Any) -> Any:
        running.append(members.sequences)
        out = real_step(members, *rest, **flags)
        running.pop()
        return out

    def forward(ids: Any, *rest: Any) -> Any:
        hidden, taps = real_forward(ids, *rest)
        begin = 0
        for sequence, n in zip(
            *((running[-1], rest[2].query_lens) if running else ((), ())), strict=True
        ):
            if sequence.request.request_id == "2":
                hidden[begin : begin + n] = float("nan")
            begin += n
        return hidden, taps

    setattr(steps, at, step)
    target.forward = forward  # type: ignore[method-assign]
    results = list(engine.run(requests(prompts(12))))
    failed = [r for r in results if isinstance(r, RequestFailure)]
    assert [(f.request.request_id, f.kind) for f in failed] == [("2", "engine")]
    done = {r.request.request_id: r.token_ids for r in results if isinstance(r, Completion)}
    assert done == {i: ids for i, ids in plain.items() if i != "2"}
    assert engine.stats.kv_blocks_used == 0


def test_one_engine_decodes_drafted_and_plain_in_turn(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    """Plain rounds make no draft context, so blocks they cached must not serve drafted ones."""
    engine = make_engine(*pair, max_num_seqs=4)
    many = requests(prompts(12))
    seen = record_drafts(engine)
    drafts = []
    for speculate in (True, False, True, True):
        seen.clear()
        done = {}
        for out in engine.run(many, speculate=speculate, max_num_seqs=3):
            assert isinstance(out, Completion)
            done[out.request.request_id] = out.token_ids
        assert done == plain
        drafts.append([(tokens, ids) for tokens, ids, _ in seen])
    assert drafts[0]
    assert drafts[1] == []
    assert drafts[0] == drafts[2] == drafts[3]
    with pytest.raises(ConfigError, match=r"in \[1, 4\]"):
        list(engine.run(many, max_num_seqs=5))


def test_timing_tells_every_token(pair: tuple[Path, Path]) -> None:
    engine = make_engine(*pair)
    for c in complete(engine, requests(prompts(6))).values():
        times = [t for t, _ in c.timing.commits]
        assert sum(n for _, n in c.timing.commits) == len(c.token_ids)
        assert c.timing.commits[0][1] == 1
        assert [c.timing.admitted, *times] == sorted([c.timing.admitted, *times])


def test_top_logits_are_the_references(pair: tuple[Path, Path]) -> None:
    engine, reference = make_engine(*pair), PlainTarget(pair[0])
    prompt = prompts(1, seed=8)[0]
    logits = reference.states(prompt)[1][-1]
    top = engine.top_logits(prompt, 3)
    assert [t for t, _ in top] == logits.topk(3).indices.tolist()
    assert [x for _, x in top] == pytest.approx(logits.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("blocks", [None, 26])
@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
def test_rule_1_results_taken_in_a_round_late(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], blocks: int | None, hit_rate: float
) -> None:
    """As on a CUDA device: the next round is launched before the last one's result is known."""
    per_block = 2 * 4 * 2 * 8 * 4 * (3 + 2)
    memory = {} if blocks is None else {"kv_cache_memory_bytes": blocks * per_block}
    sizes = {"max_num_seqs": 5, "max_model_len": 64 if blocks else 256, **memory}
    engine = make_engine(*pair, overlap="on", **sizes)
    teach_late(engine, plain, hit_rate)
    for _ in range(2):
        assert outputs(engine, requests(prompts(12))) == plain
    assert (engine.stats.preemptions > 0) == (blocks is not None)
    done = complete(engine, requests(prompts(12), SamplingParams(max_tokens=7))).values()
    assert all(c.token_ids == plain[c.request.request_id][:7] for c in done)
    assert all(1 + sum(r.committed for r in c.rounds) == len(c.token_ids) for c in done)
    assert engine.stats.kv_blocks_used == 0


def teach_late(engine: Engine, answers: dict[str, tuple[int, ...]], hit_rate: float) -> None:
    """As `teach`, from the position the device is at: the host does not know it yet."""
    rng, real = random.Random(0), engine.runner._draft

    def draft(members: Members) -> Drafts:
        drafts = real(members)
        ids = drafts.token_ids.clone()
        at = engine.runner.rows.num_computed[members.index].tolist()
        for r, s in enumerate(members.sequences):
            rest = answers[s.request.request_id][at[r] + 1 - s.num_prompt :]
            for k, token in zip(range(ids.shape[1]), rest, strict=False):
                if rng.random() < hit_rate:
                    ids[r, k] = token
        return replace(drafts, token_ids=ids)

    engine.runner._draft = draft  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 2**63},
        {"max_tokens": 0},
        {"top_k": 10**20},
        {"temperature": 1e39},
        {"temperature": 1e-30},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"seed": 2**63},
    ],
)
def test_values_that_no_tensor_holds_are_refused_with_their_bound(values: dict[str, Any]) -> None:
    """One row with max_tokens 2**63 once ended the whole run with an OverflowError."""
    (name,) = values
    with pytest.raises(RequestError, match=rf"^{name} must be .*, got "):
        SamplingParams(**values)


def test_the_largest_values_run(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(
        max_tokens=2**31 - 1, top_k=2**31 - 1, seed=2**63 - 1, temperature=1000.0, min_p=1.0
    )
    low = SamplingParams(max_tokens=8, temperature=0.001)
    prompt = tuple(prompts(1)[0])
    many = [
        Request(request_id=str(i), prompt_token_ids=prompt, params=p)
        for i, p in enumerate((params, low))
    ]
    done = complete(make_engine(*pair, max_model_len=64), many)
    assert len(done["0"].token_ids) in range(1, 64 - len(prompt) + 1)
