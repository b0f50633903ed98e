"""What became of a request, as JSON values for another process: its request stays behind."""

from typing import Any

from engine.request import Completion, FinishReason, Request, RequestFailure, Round, Timing


def encode_result(result: Completion | RequestFailure) -> dict[str, Any]:
    """A result without its request."""
    if isinstance(result, RequestFailure):
        return {
            "kind": result.kind,
            "message": result.message,
            "retryable": result.retryable,
            "hint": result.hint,
        }
    return {
        "token_ids": result.token_ids,
        "text": result.text,
        "finish_reason": result.finish_reason.value,
        "stop_reason": result.stop_reason,
        "num_cached_tokens": result.num_cached_tokens,
        "rounds": [(r.drafted, r.accepted, r.committed) for r in result.rounds],
        "admitted": result.timing.admitted,
        "commits": result.timing.commits,
    }


def decode_result(value: dict[str, Any], request: Request) -> Completion | RequestFailure:
    """What `encode_result` gave, back.

    Args:
        value: The result. Its times are of the clock of the process that made it.
        request: What it is the result of.
    """
    if "kind" in value:
        return RequestFailure(request=request, **value)
    return Completion(
        request=request,
        token_ids=tuple(value["token_ids"]),
        text=value["text"],
        finish_reason=FinishReason(value["finish_reason"]),
        stop_reason=value["stop_reason"],
        num_cached_tokens=value["num_cached_tokens"],
        rounds=tuple(Round(*each) for each in value["rounds"]),
        timing=Timing(value["admitted"], tuple((when, kept) for when, kept in value["commits"])),
    )
