"""DeepSeek's own evaluation loop, reproduced: token ids, accepted counts and confidences.

Three questions by default, of other schedules 96 tokens; DSPARK_QUESTIONS=60 runs all, whole.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Completion, Engine, EngineConfig, Request, SamplingParams
from tests.e2e.conftest import RealPair
from tests.helpers.engines import complete, make_engine, record_drafts

COUNT = int(os.environ.get("DSPARK_QUESTIONS", "3"))
TOKENS = 256 if "DSPARK_QUESTIONS" in os.environ else 96
"""Of a question, under schedules other than the reference's."""

TIE = 1e-4
"""Two logits this close may swap between two float32 products of other shapes."""


def ask(questions: list[dict[str, Any]], max_tokens: int = 256) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens)
    return [
        Request(request_id=str(q["i"]), prompt_token_ids=tuple(q["prompt_ids"]), params=params)
        for q in questions
    ]


def real_engine(pair: RealPair, **settings: Any) -> Engine:
    config = {"max_num_seqs": 1, "max_model_len": 1024, "kv_block_size": 16}
    return make_engine(pair.target, pair.draft, **{**config, **settings})


def is_tie(target: Path, ids: list[int]) -> bool:
    """Are the top two logits after `ids` within TIE of each other?"""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        top = model(torch.tensor([ids])).logits[0, -1].topk(2).values
    print(f"near tie: the top two logits differ by {float(top[0] - top[1]):.2e}")
    return float(top[0] - top[1]) < TIE


def assert_same(pair: RealPair, done: dict[str, Completion], questions: list[Any]) -> list[int]:
    """Equal ids, except from a near tie on. Returns the questions that are wholly equal."""
    equal = []
    for q in questions:
        completion = done[str(q["i"])]
        got, want = list(completion.token_ids), q["output_ids"]
        want = want[: completion.request.params.max_tokens]
        if got == want:
            equal.append(q["i"])
            continue
        at = next(k for k in range(len(want)) if got[: k + 1] != want[: k + 1])
        assert is_tie(pair.target, q["prompt_ids"] + want[:at]), f"question {q['i']}, token {at}"
    return equal


def test_tokens_accepted_counts_and_confidences_are_the_references(real_pair: RealPair) -> None:
    questions = real_pair.questions[:COUNT]
    engine = real_engine(real_pair)
    seen = record_drafts(engine)
    done = complete(engine, ask(questions))
    assert_confidences(seen, questions[0]["confidence"])
    equal = assert_same(real_pair, done, questions)
    ours: list[int] = []
    theirs: list[int] = []
    for q in questions:
        completion = done[str(q["i"])]
        got = [r.committed for r in completion.rounds]
        want = q["acceptance_lengths"]
        if len(completion.token_ids) == 256:
            # cut at the limit: the reference counts past it in its last round
            got, want = got[: len(want) - 1], want[:-1]
        if q["i"] in equal:
            assert got == want, f"question {q['i']}"
        ours, theirs = ours + got, theirs + want
    pooled, reference = sum(ours) / len(ours), sum(theirs) / len(theirs)
    print(
        f"{len(equal)} of {len(questions)} equal; acceptance length {pooled:.3f}, {reference:.3f}"
    )
    assert abs(pooled - reference) < 0.01


def assert_confidences(
    seen: list[tuple[list[int], list[int], torch.Tensor | None]], reference: list[Any]
) -> None:
    """Those of the first question: logits, to the four digits the reference kept, in float32."""
    assert len(seen) >= len(reference)
    for (_, _, confidence), (want, _) in zip(seen, reference, strict=False):
        assert confidence is not None
        torch.testing.assert_close(confidence, torch.tensor(want), atol=2e-3, rtol=0)


MEMORY = 40_000_000 if COUNT > 3 else 25_000_000
"""Less than that many questions need together."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "preempted": {"max_num_seqs": 8, "max_model_len": 448, "kv_cache_memory_bytes": MEMORY},
    "prefill by 64": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
}
if "DSPARK_FULL" in os.environ:
    SCHEDULES |= {"4 at once": {"max_num_seqs": 4}, "32 at once": {"max_num_seqs": 32}}


@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_other_schedules_give_the_same(real_pair: RealPair, settings: dict[str, Any]) -> None:
    questions = real_pair.questions[:COUNT]
    shuffled = sorted(questions, key=lambda q: (q["i"] * 7919) % 61)
    engine = real_engine(real_pair, **settings)
    assert_same(real_pair, complete(engine, ask(shuffled, TOKENS)), questions)
    assert (engine.stats.preemptions > 0) == ("kv_cache_memory_bytes" in settings)


def test_plain_decoding_gives_the_same(real_pair: RealPair) -> None:
    questions = real_pair.questions[:2]
    engine = Engine(
        EngineConfig(
            model=str(real_pair.target),
            device="cpu",
            max_num_seqs=2,
            max_model_len=512,
            threads=1,
        )
    )
    assert_same(real_pair, complete(engine, ask(questions, TOKENS)), questions)
