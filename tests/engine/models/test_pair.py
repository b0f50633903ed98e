"""A draft and a target that do not belong together are refused with both values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, ConfigError
from engine.models.config import DraftSpec, TargetSpec
from engine.models.draft_config import parse_draft
from engine.models.pair import check_pair, check_tokenizer, resolve_num_speculative_tokens
from engine.models.target_config import parse_target
from engine.text import Tokenizer
from tests.helpers.checkpoints import write_pair, write_tokenizer

Pair = tuple[TargetSpec, DraftSpec, Tokenizer]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return parse_target(target), parse_draft(draft), Tokenizer.load(target)


def test_a_pair_that_belongs_together_passes(pair: Pair) -> None:
    target, draft, tokenizer = pair
    check_pair(target, draft, tokenizer, None)
    check_pair(target, draft, tokenizer, tokenizer)
    check_pair(target, replace(draft, num_target_layers=None), tokenizer, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 48}, "expects hidden size 48, the target has 32"),
        ({"vocab_size": 256}, "expects vocabulary 256, the target has 128"),
        ({"num_target_layers": 4}, "expects number of target layers 4, the target has 3"),
        ({"taps": (1, 4), "num_target_layers": None}, "after layer 4, the target has 3"),
        ({"mask_token_id": 128}, "mask token is 128, the target's vocabulary ends at 127"),
    ],
)
def test_a_pair_that_does_not_is_refused_with_both_values(
    pair: Pair, change: dict[str, Any], message: str
) -> None:
    target, draft, tokenizer = pair
    with pytest.raises(CheckpointError, match=message) as error:
        check_pair(target, replace(draft, **change), tokenizer, None)
    assert "trained for this target" in error.value.hint


def test_own_width_may_differ_only_where_nothing_is_borrowed(pair: Pair) -> None:
    target, draft, tokenizer = pair
    wide = replace(draft, layers=replace(draft.layers, hidden_size=64))
    with pytest.raises(CheckpointError, match="own hidden size is 64, the target's is 32"):
        check_pair(target, wide, tokenizer, None)


def test_another_tokenizer_is_refused(pair: Pair, tmp_path: Path) -> None:
    target, draft, tokenizer = pair
    other = Tokenizer.load(write_tokenizer(tmp_path, 120))
    with pytest.raises(CheckpointError, match="120 tokens, the target's has 128"):
        check_pair(target, draft, tokenizer, other)
    other._inner.get_vocab = lambda: {**tokenizer.vocabulary(), "zz": 5}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"tokenizer has 'zz' as id 5, the target's has '"):
        check_pair(target, draft, tokenizer, other)


def test_a_tokenizer_beyond_the_embedding_is_refused(pair: Pair) -> None:
    target, _, tokenizer = pair
    with pytest.raises(CheckpointError, match="ids up to 127, the target's vocabulary ends at 99"):
        check_tokenizer(replace(target, vocab_size=100), tokenizer)


def test_number_of_speculative_tokens(pair: Pair) -> None:
    draft = pair[1]
    assert resolve_num_speculative_tokens(draft, None) == 4
    assert [resolve_num_speculative_tokens(draft, n) for n in (1, 3, 4)] == [1, 3, 4]
    for bad in (0, 5):
        with pytest.raises(ConfigError, match=rf"in \[1, 4\], .* got {bad}") as error:
            resolve_num_speculative_tokens(draft, bad)
        assert "at most 4" in error.value.hint
