"""Row formats, detected from the row itself, made into one kind of request."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dspark_cli.conversation import Message, read_messages, read_sharegpt, read_turns
from dspark_cli.jsonl import type_name
from dspark_cli.sampling import SAMPLING_FIELDS, take_sampling, take_unsupported
from engine.errors import DSparkError, RequestError
from engine.request import SamplingParams

PROMPT_FIELDS = ("prompt", "messages", "turns", "prompt_token_ids", "conversations")
METADATA_FIELDS = ("metadata", "input", "task_id")
_ID_FIELDS = ("id", "custom_id", "task_id")
_ENVELOPE = ("custom_id", "method", "url", "body")
_CHAT_URLS = ("/v1/chat/completions", "/chat/completions")
_TEXT_URLS = ("/v1/completions", "/completions")


class TextTokenizer(Protocol):
    """What a prompt needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""
        ...

    def encode_chat(
        self,
        messages: list[Message],
        template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation, with the opening of the reply."""
        ...

    def render_chat(
        self,
        messages: list[Message],
        template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The text `encode_chat` encodes."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to continue, token ids to continue, or a conversation to answer: one of them is set."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    later: tuple[Message, ...] = ()
    """User turns to ask after this one, each once the one before it is answered."""

    def then(self, reply: str) -> "Prompt":
        """The next turn's prompt, when `reply` answered this one."""
        answered = (*self.messages, {"role": "assistant", "content": reply})
        return replace(self, messages=(*answered, self.later[0]), later=self.later[1:])

    def encode(self, tokenizer: TextTokenizer, chat_template: str | None) -> tuple[int, ...]:
        """Token ids for the engine, which knows which ids there are.

        Raises:
            RequestError: The template refuses the conversation.
        """
        if self.token_ids is not None:
            return self.token_ids
        if self.text is not None:
            return tuple(tokenizer.encode(self.text))
        kwargs = dict(self.template_kwargs) or None
        return tuple(tokenizer.encode_chat(list(self.messages), kwargs, chat_template))

    def render(self, tokenizer: TextTokenizer, chat_template: str | None) -> str:
        """What the model will see, as text."""
        if self.token_ids is not None:
            return tokenizer.decode(list(self.token_ids))
        if self.text is not None:
            return self.text
        kwargs = dict(self.template_kwargs) or None
        return tokenizer.render_chat(list(self.messages), kwargs, chat_template)

    def brief(self) -> str:
        """What was asked (last, if there are several turns), for people."""
        if self.messages:
            return (*self.messages, *self.later)[-1]["content"]
        return self.text if self.text is not None else f"{len(self.token_ids or ())} token ids"

    def identity(self) -> dict[str, Any]:
        """Everything of the request that decides the prompt's token ids, given the tokenizer."""
        if self.token_ids is not None:
            return {"token_ids": self.token_ids}
        if self.text is not None:
            return {"text": self.text}
        identity = {"messages": self.messages, "template_kwargs": dict(self.template_kwargs)}
        return identity | ({"later": self.later} if self.later else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """What the command line says about every row."""

    params: SamplingParams
    n: int = 1
    chat: bool = False
    """A `prompt` is one user message, not text to continue."""

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    passthrough: bool = False


@dataclass(frozen=True, slots=True)
class RowRequest:
    """One row, understood."""

    prompt: Prompt
    params: SamplingParams
    n: int
    data: dict[str, Any]
    """Fields that are data, for the output's `input`; empty without --passthrough."""


def encode_prompt(
    prompt: Prompt, tokenizer: TextTokenizer, chat_template: str | None
) -> tuple[int, ...]:
    """Token ids of a prompt, whatever the tokenizer and the template make of it.

    Raises:
        RequestError: There are none.
    """
    try:
        token_ids = prompt.encode(tokenizer, chat_template)
    except DSparkError as error:
        kind = error.kind if isinstance(error, RequestError) else "schema"
        raise RequestError(kind, str(error), error.hint) from None
    except Exception as error:  # noqa: BLE001  # a template is a program: it raises what it likes
        raise RequestError(
            "schema", f"the prompt cannot be encoded: {error}", "fix the row or the template"
        ) from None
    if not token_ids:
        raise RequestError("empty", "the prompt has no tokens", "give at least one character")
    return token_ids


def turn_name(row_id: str | int, turn: int) -> str:
    """Request id of a row's turn, from 0; the first is the row's own, as if it were alone."""
    return f"{row_id}\0turn {turn + 1}" if turn else str(row_id)


def read_id(row: Mapping[str, Any]) -> str | int | None:
    """The row's own name, None if it has none.

    Raises:
        RequestError: It is neither a string nor an integer (kind `schema`).
    """
    for name in _ID_FIELDS:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise RequestError(
                "schema",
                f"{name} must be a string or an integer, got {type_name(value)}",
                f"fix {name}, or leave it out to use the row's index",
            )
        if value == "":
            raise RequestError(
                "schema", f"{name} is empty", f"fill {name}, or leave it out to use the row's index"
            )
        if "\0" in str(value):  # it sets a turn's number apart, see turn_name
            raise RequestError("schema", f"{name} holds the character NUL", f"fix {name}")
        return value
    return None


def read_row(row: Mapping[str, Any], rules: RowRules) -> RowRequest:
    """Understand one row of any format.

    Args:
        row: The row's fields.
        rules: The command line's choices.

    Returns:
        The request, its sampling, and the fields that are data.

    Raises:
        RequestError: Kind `schema`, `empty` or `unsupported`.
    """
    if "body" in row or ("custom_id" in row and "url" in row):
        return _read_openai(dict(row), rules)
    rest = dict(row)
    for name in ("id", "custom_id"):
        rest.pop(name, None)
    take_unsupported(rest)
    params, n = take_sampling(rest, rules.params, rules.n)
    prompt = _take_prompt(rest, rules, PROMPT_FIELDS)
    return RowRequest(prompt, params, n, _data(rest, rules))


def _read_openai(row: dict[str, Any], rules: RowRules) -> RowRequest:
    body = row.pop("body", None)
    if not isinstance(body, dict):
        raise RequestError("schema", f"body must be an object, got {type_name(body)}", "fix body")
    method = row.pop("method", None) or "POST"
    if method != "POST":
        raise RequestError("unsupported", f"method {method!r} is not supported", "use POST")
    url = row.pop("url", None)
    if url is None:
        url = _CHAT_URLS[0] if "messages" in body else _TEXT_URLS[0]
    if url not in _CHAT_URLS + _TEXT_URLS:
        raise RequestError(
            "unsupported", f"url {url!r} is not served", f"use {_CHAT_URLS[0]} or {_TEXT_URLS[0]}"
        )
    for name in ("id", "custom_id"):
        row.pop(name, None)
    rest = dict(body)
    model = rest.pop("model", None)  # one run serves one model, whatever the line calls it
    if model is not None and not isinstance(model, str):
        raise RequestError("schema", f"model must be a string, got {type_name(model)}", "fix model")
    rest.pop("user", None)
    take_unsupported(rest)
    params, n = take_sampling(rest, rules.params, rules.n)
    wanted = ("messages",) if url in _CHAT_URLS else ("prompt", "prompt_token_ids")
    raw = RowRules(params=params, template_kwargs=rules.template_kwargs)
    prompt = _take_prompt(rest, raw, wanted)
    return RowRequest(prompt, params, n, _data({**row, **rest}, rules))


def _take_prompt(row: dict[str, Any], rules: RowRules, wanted: tuple[str, ...]) -> Prompt:
    """Remove the one prompt field of `row`, and what belongs to it."""
    given = [name for name in wanted if row.get(name) is not None]
    if not given:
        raise RequestError("schema", "the row has no prompt", f"give one of {', '.join(wanted)}")
    if len(given) > 1:
        raise RequestError("schema", f"the row has both {given[0]} and {given[1]}", "keep one")
    name = given[0]
    value = row.pop(name)
    for other in wanted:  # what is left is null
        row.pop(other, None)
    kwargs = _template_kwargs(row, rules)
    if name == "prompt":
        text = _text(value)
        if rules.chat:
            return Prompt(messages=({"role": "user", "content": text},), template_kwargs=kwargs)
        prompt = Prompt(text=text)
    elif name == "prompt_token_ids":
        prompt = Prompt(token_ids=_token_ids(value))
    else:
        read = {"messages": read_messages, "turns": read_turns, "conversations": read_sharegpt}
        messages = read[name](value)
        now = 1 if name == "turns" else len(messages)
        return Prompt(messages=messages[:now], template_kwargs=kwargs, later=messages[now:])
    if kwargs != dict(rules.template_kwargs):
        raise RequestError(
            "schema", f"chat_template_kwargs has no effect on {name}", "use messages, or drop it"
        )
    return prompt


def _template_kwargs(row: dict[str, Any], rules: RowRules) -> dict[str, Any]:
    own = row.pop("chat_template_kwargs", None)
    if own is None:
        return dict(rules.template_kwargs)
    if not isinstance(own, dict):
        raise RequestError(
            "schema",
            f"chat_template_kwargs must be an object, got {type_name(own)}",
            "fix chat_template_kwargs",
        )
    return {**rules.template_kwargs, **own}


def _text(value: object) -> str:
    if not isinstance(value, str):
        hint = "use prompt_token_ids for ids" if isinstance(value, list) else "fix prompt"
        raise RequestError("schema", f"prompt must be a string, got {type_name(value)}", hint)
    if not value:
        raise RequestError("empty", "prompt is empty", "give at least one character")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestError(
            "schema", f"prompt_token_ids must be a list, got {type_name(value)}", "fix the field"
        )
    bad = next((t for t in value if isinstance(t, bool) or not isinstance(t, int)), None)
    if bad is not None or None in value:
        raise RequestError(
            "schema", f"prompt_token_ids must hold integers, got {type_name(bad)}", "fix the field"
        )
    if not value:
        raise RequestError("empty", "prompt_token_ids is empty", "give at least one token id")
    if min(value) < 0:
        raise RequestError(
            "schema", f"prompt_token_ids must be >= 0, got {min(value)}", "fix the field"
        )
    return tuple(value)


def _data(rest: dict[str, Any], rules: RowRules) -> dict[str, Any]:
    """What is left of a row: data if declared so, an error if not."""
    if rules.passthrough:
        return rest
    unknown = next((name for name in rest if name not in METADATA_FIELDS), None)
    if unknown is None:
        return {}
    known = (*PROMPT_FIELDS, *SAMPLING_FIELDS, *_ENVELOPE, "id", "chat_template_kwargs")
    near = difflib.get_close_matches(unknown, known, n=1)
    carry = "--passthrough carries other fields to the output"
    hint = f"did you mean {near[0]}? {carry}" if near else carry
    raise RequestError("schema", f"unknown field {unknown[:80]!r}", hint)
