"""What becomes of a request: refused before it starts, completed, or failed on its way."""

from engine.errors import RequestError
from engine.request import Completion, Request, RequestFailure, Timing
from engine.sequence import End, Sequence
from engine.text import Tokenizer

Output = Completion | RequestFailure


def check_request(
    request: Request,
    max_model_len: int,
    vocab_size: int,
    trained: int | None = None,
    by: str = "--max-model-len",
) -> None:
    """Refuse what cannot be served.

    Args:
        request: What was asked for.
        max_model_len: Prompt and output tokens of one request.
        vocab_size: Token ids are below it.
        trained: What `max_model_len` can be at most; None: more than it is.
        by: The option that sets it.

    Raises:
        RequestError: With the reason and what to do.
    """
    ids = request.prompt_token_ids
    if not ids:
        raise RequestError("empty", "the prompt has no tokens", "give at least one token")
    if len(ids) >= max_model_len:
        raise RequestError(
            "too_long",
            f"the prompt has {len(ids)} tokens, the context holds {max_model_len} "
            "with at least one output token",
            f"shorten it to {max_model_len - 1} tokens"
            + (f", or raise {by}" if trained is None or trained > max_model_len else ""),
        )
    if bad := next((t for t in ids if not 0 <= t < vocab_size), None):
        raise RequestError(
            "schema",
            f"prompt token id {bad} is outside the vocabulary [0, {vocab_size})",
            "tokenise with the target's tokenizer",
        )
    for token in request.params.stop_token_ids:
        if token >= vocab_size:
            raise RequestError(
                "schema",
                f"stop token id {token} is outside the vocabulary [0, {vocab_size})",
                "use ids of the target's tokenizer",
            )


def complete(sequence: Sequence, end: End, tokenizer: Tokenizer) -> Completion:
    """What the caller of a finished request gets."""
    ids = tuple(sequence.token_ids[sequence.num_prompt :])
    text = tokenizer.decode(ids)
    return Completion(
        request=sequence.request,
        token_ids=ids,
        text=text if end.text_end is None else text[: end.text_end],
        finish_reason=end.reason,
        stop_reason=end.stop_reason,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        rounds=tuple(sequence.rounds),
        timing=Timing(sequence.admitted or 0.0, tuple(sequence.commits)),
    )


def not_finite(sequence: Sequence) -> RequestFailure:
    """What the caller gets where the target's logits are no numbers."""
    return RequestFailure(
        request=sequence.request,
        kind="engine",
        message=(
            f"the target's logits after {len(sequence.token_ids)} tokens are not finite; "
            "a wider --dtype may help"
        ),
        retryable=False,
    )
