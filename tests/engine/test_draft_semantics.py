"""Rule 6, checkpoint semantics: every draft of every round equals a separate, dense definition.

Random drafts are never accepted, so a wrong tap, window, mask or position would only cost speed in
production and show nowhere. Here each draft token and confidence logit is recomputed from scratch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.drafts import MASK
from tests.helpers.engines import make_engine, outputs, prompts, record_drafts, requests, teach
from tests.helpers.reference import PlainDraft, PlainTarget

DRAFTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov": "gated"},
    "rnn": {"markov": "rnn"},
    "no head": {"markov": "none"},
    "no confidence": {"confidence": False},
    "confidence without markov": {"confidence_with_markov": False},
    "own embedding and head": {"embed": True, "lm_head": True},
    "taps at both ends": {"taps": (0, 3)},
    "one tap": {"taps": (2,)},
    "sharded": {"shards": 3},
    "speculators": {"fmt": "speculators"},
    "speculators fill-in": {"fmt": "speculators", "sample_from_anchor": False},
    "speculators default layout": {"fmt": "speculators", "sample_from_anchor": None},
    "reduced vocabulary": {"fmt": "speculators", "draft_vocab_size": 50},
    "reduced vocabulary, rnn": {"fmt": "speculators", "draft_vocab_size": 50, "markov": "rnn"},
    "window": {"fmt": "speculators", "windows": (5, 0)},
    "window, bidirectional": {"fmt": "speculators", "windows": (0, 5), "window_non_causal": True},
    "window, fill-in": {"fmt": "speculators", "windows": (3, 3), "sample_from_anchor": False},
    "biases": {"attention_bias": True},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_rule_6_drafts_are_what_the_checkpoint_means(tmp_path: Path, name: str) -> None:
    how = DRAFTS[name]
    target = write_target(tmp_path / "target", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "draft", **how)
    fill_in = how.get("sample_from_anchor", True) in (False, None) and "fmt" in how
    reference = PlainDraft(
        folder=draft,
        target=PlainTarget(target),
        taps=how.get("taps", (1, 3)),
        gamma=4,
        mask=MASK,
        fill_in=fill_in,
        windows=how.get("windows", (0, 0)),
        window_causal=not how.get("window_non_causal", False),
        kind=how.get("markov", "vanilla"),
    )
    many = requests(prompts(3, seed=4, longest=14), max_tokens=9)
    plain = outputs(make_engine(target), many)
    engine = make_engine(target, draft, max_num_batched_tokens=6, kv_block_size=4)
    seen = record_drafts(engine)
    teach(engine, plain, 0.6)  # rejections, acceptances, and bonus tokens all move the context
    assert outputs(engine, many) == plain
    assert len(seen) >= 6
    for tokens, ids, confidence in seen:
        want, logits = reference.draft(tokens)
        assert ids == want
        assert (confidence is None) == (not how.get("confidence", True))
        if confidence is not None:
            torch.testing.assert_close(confidence, torch.tensor(logits), atol=2e-4, rtol=2e-4)


def test_fewer_drafts_than_trained_see_fewer_mask_rows(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", "Qwen3ForCausalLM")
    draft = write_draft(tmp_path / "draft")
    reference = PlainDraft(
        folder=draft, target=PlainTarget(target), taps=(1, 3), gamma=2, mask=MASK
    )
    engine = make_engine(target, draft, num_speculative_tokens=2)
    seen = record_drafts(engine)
    outputs(engine, requests(prompts(2, seed=4, longest=14), max_tokens=6))
    assert seen
    for tokens, ids, _ in seen:
        assert ids == reference.draft(tokens)[0]
