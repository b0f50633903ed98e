"""Sampling fields of a row, over the command line's; and fields known but not served."""

from dataclasses import fields, replace
from typing import Any

from dspark_cli.jsonl import type_name
from engine.errors import RequestError
from engine.request import SamplingParams

MAX_SAMPLES = 1024

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
)

_LORA = "merge the adapter into the checkpoint"
_PENALTY = "leave it out: dspark samples from the target's own distribution"
_TOOLS = "put the tools' description into the messages as text"
_TEXT = "only text prompts are served"
_DROP = "leave the field out"

# Field -> (values that ask for nothing, what to do instead). null always asks for nothing.
UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "logprobs": ((False,), "leave it out: token probabilities are not written"),
    "top_logprobs": ((0,), "leave it out: token probabilities are not written"),
    "prompt_logprobs": ((0, False), "leave it out: token probabilities are not written"),
    "echo": ((False,), "put the prompt and the text together afterwards"),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "response_format": (({"type": "text"},), "ask for the format in the prompt"),
    "guided_json": ((), "ask for the format in the prompt"),
    "guided_regex": ((), "ask for the format in the prompt"),
    "guided_choice": ((), "ask for the format in the prompt"),
    "guided_grammar": ((), "ask for the format in the prompt"),
    "structured_outputs": ((), "ask for the format in the prompt"),
    "presence_penalty": ((0,), _PENALTY),
    "frequency_penalty": ((0,), _PENALTY),
    "repetition_penalty": ((1,), _PENALTY),
    "length_penalty": ((1,), _PENALTY),
    "logit_bias": (({},), _PENALTY),
    "bad_words": (([],), _PENALTY),
    "allowed_token_ids": ((), _PENALTY),
    "typical_p": ((1,), _PENALTY),
    "min_tokens": ((0,), "leave it out, or use ignore_eos with max_tokens"),
    "best_of": ((1,), "use n and choose afterwards"),
    "use_beam_search": ((False,), "use n and choose afterwards"),
    "num_beams": ((1,), "use n and choose afterwards"),
    "stream": ((False,), "leave it out: finished rows go to the journal as they end"),
    "stream_options": ((), "leave it out: finished rows go to the journal as they end"),
    "suffix": (("",), "infilling is not served"),
    "lora": ((), _LORA),
    "lora_name": ((), _LORA),
    "lora_path": ((), _LORA),
    "lora_request": ((), _LORA),
    "adapter": ((), _LORA),
    "images": (([],), _TEXT),
    "image": ((), _TEXT),
    "audio": ((), _TEXT),
    "videos": (([],), _TEXT),
    "modalities": ((["text"],), _TEXT),
    "prompt_embeds": ((), "give prompt_token_ids"),
    "chat_template": ((), "use --chat-template, one for the run"),
    "add_generation_prompt": ((True,), _DROP),
    "continue_final_message": ((False,), _DROP),
    "add_special_tokens": ((), _DROP),
    "skip_special_tokens": ((True,), _DROP),
    "include_stop_str_in_output": ((False,), "read stop_reason in the output row"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "reasoning_effort": ((), "use chat_template_kwargs"),
    "store": ((False,), _DROP),
    "service_tier": (("auto", "default"), _DROP),
    "extra_body": (({},), "put its fields into the row itself"),
}


def take_unsupported(row: dict[str, Any]) -> None:
    """Remove the fields that ask for nothing; the first that asks for something is an error."""
    for name in [name for name in row if name in UNSUPPORTED]:
        value = row.pop(name)
        neutral, instead = UNSUPPORTED[name]
        if value is not None and not any(_same(value, nothing) for nothing in neutral):
            raise RequestError("unsupported", f"{name} is not supported", instead)


def take_sampling(
    row: dict[str, Any], defaults: SamplingParams, n: int
) -> tuple[SamplingParams, int]:
    """Remove the sampling fields of `row` and lay them over the defaults.

    Args:
        row: The row's fields; sampling fields are popped.
        defaults: The command line's sampling.
        n: The command line's completions per row.

    Returns:
        The row's sampling and number of completions.

    Raises:
        RequestError: A field has the wrong type or is out of range (kind `schema`).
    """
    given = {name: row.pop(name) for name in SAMPLING_FIELDS if name in row}
    given = {name: value for name, value in given.items() if value is not None}
    if "max_completion_tokens" in given:
        limit = given.pop("max_completion_tokens")
        if given.setdefault("max_tokens", limit) != limit:
            raise RequestError(
                "schema", "max_tokens and max_completion_tokens differ", "keep one of them"
            )
    if not given:
        return defaults, n
    n = _integer("n", given.pop("n", n))
    if not 1 <= n <= MAX_SAMPLES:
        raise RequestError("schema", f"n must be in [1, {MAX_SAMPLES}], got {n}", "fix n")
    values: dict[str, Any] = {name: _READ[name](name, value) for name, value in given.items()}
    return replace(defaults, **values), n


def effective(params: SamplingParams) -> dict[str, Any]:
    """All sampling values as JSON."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def _same(value: object, nothing: object) -> bool:
    # 0 and 0.0 are one value here, 0 and false are not
    return value == nothing and isinstance(value, bool) == isinstance(nothing, bool)


def _wrong(name: str, want: str, value: object) -> RequestError:
    return RequestError("schema", f"{name} must be {want}, got {type_name(value)}", f"fix {name}")


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "an integer", value)
    return value


def _top_k(name: str, value: object) -> int:
    count = _integer(name, value)
    return 0 if count == -1 else count  # -1 is vLLM's way to keep all


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, "a number below 1e308", value) from None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _wrong(name, "a string or a list of strings", value)
    return tuple(items)


def _integers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(name, "a list of integers", value)
    return tuple(_integer(f"every entry of {name}", item) for item in value)


_READ = {
    "temperature": _number,
    "top_p": _number,
    "top_k": _top_k,
    "min_p": _number,
    "seed": _integer,
    "max_tokens": _integer,
    "stop": _strings,
    "stop_token_ids": _integers,
    "ignore_eos": _flag,
}
