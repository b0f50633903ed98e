"""Do a target and a draft belong together? A wrong pair would show only as bad acceptance."""

from engine.errors import CheckpointError, ConfigError
from engine.models.interface import AnyDraft, AnyTarget
from engine.text import Tokenizer

_HINT = "use the drafter that was trained for this target"


def check_pair(
    target: AnyTarget,
    draft: AnyDraft,
    target_tokenizer: Tokenizer,
    draft_tokenizer: Tokenizer | None,
) -> None:
    """Refuse a draft that was not trained for this target.

    Args:
        target: The target.
        draft: The draft.
        target_tokenizer: The target's tokenizer.
        draft_tokenizer: The draft folder's, if it ships one.

    Raises:
        CheckpointError: They do not fit, with both values.
    """
    check_tokenizer(target, target_tokenizer)
    pairs = (
        ("hidden size", draft.target_hidden_size, target.layers.hidden_size),
        ("vocabulary", draft.vocab_size, target.vocab_size),
        ("number of target layers", draft.num_target_layers, target.layers.num_layers),
    )
    for what, wanted, found in pairs:
        if wanted is not None and wanted != found:
            raise _mismatch(f"it expects {what} {wanted}, the target has {found}")
    # The draft adds its rows to the target's embedding where it brings none of its own.
    if draft.layers.hidden_size != target.layers.hidden_size:
        raise _mismatch(
            f"its own hidden size is {draft.layers.hidden_size}, the target's is "
            f"{target.layers.hidden_size}"
        )
    if draft.taps[-1] > target.layers.num_layers:
        raise _mismatch(
            f"it taps the target after layer {draft.taps[-1]}, the target has "
            f"{target.layers.num_layers}"
        )
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise _mismatch(
            f"its mask token is {draft.mask_token_id}, the target's vocabulary ends at "
            f"{target.vocab_size - 1}"
        )
    if draft_tokenizer is not None:
        _check_tokenizers(target_tokenizer, draft_tokenizer)


def check_tokenizer(target: AnyTarget, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer of another vocabulary.

    Tokens added to it may lie beyond the embedding: a row that uses one is that row's error.

    Args:
        target: The target.
        tokenizer: Its tokenizer.
    """
    if tokenizer.num_base_tokens > target.vocab_size:
        raise CheckpointError(
            f"the tokenizer has ids up to {tokenizer.num_base_tokens - 1}, "
            f"the target's vocabulary ends at {target.vocab_size - 1}",
            "use the tokenizer of the same checkpoint",
        )


def resolve_num_speculative_tokens(spec: AnyDraft, requested: int | None) -> int:
    """Draft tokens per round.

    Args:
        spec: The draft.
        requested: What the user asked for; None takes what the draft was trained for.

    Raises:
        ConfigError: More than the draft was trained for: those positions would be noise.
    """
    trained = spec.num_speculative_tokens
    if requested is None:
        return trained
    if not 1 <= requested <= trained:
        raise ConfigError(
            f"--num-speculative-tokens must be in [1, {trained}], what this draft was trained for, "
            f"got {requested}",
            hint=f"give at most {trained}, or leave it out",
        )
    return requested


def _check_tokenizers(target: Tokenizer, draft: Tokenizer) -> None:
    ours, theirs = target.vocabulary(), draft.vocabulary()
    if ours == theirs:
        return
    for token, number in sorted(theirs.items(), key=lambda item: item[1]):
        if ours.get(token) != number:
            raise _mismatch(
                f"its tokenizer has {token!r} as id {number}, the target's has "
                f"{target.token(number)!r} there"
            )
    raise _mismatch(f"its tokenizer has {len(theirs)} tokens, the target's has {len(ours)}")


def _mismatch(problem: str) -> CheckpointError:
    return CheckpointError(f"the draft does not belong to this target: {problem}", _HINT)
