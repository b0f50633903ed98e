"""Conversations as rows hold them: OpenAI messages, ShareGPT turns, plain user turns."""

from typing import Any

from dspark_cli.jsonl import type_name
from engine.errors import RequestError

Message = dict[str, str]

_ROLES = ("system", "user", "assistant")
_OTHER_ROLES = ("tool", "function", "developer", "ipython")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
}
_OTHER_FIELDS = ("name", "tool_calls", "tool_call_id", "function_call", "audio", "refusal")


def read_messages(value: object) -> tuple[Message, ...]:
    """OpenAI `messages`, ready for a chat template.

    Raises:
        RequestError: Kind `schema`, `empty` or `unsupported`.
    """
    items = _list("messages", value)
    messages = tuple(_message(f"messages[{at}]", item) for at, item in enumerate(items))
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "unsupported",
            "messages end with the assistant: going on with its reply is not supported",
            "drop the last message to have it written again",
        )
    return _spoken("messages", messages)


def read_sharegpt(value: object) -> tuple[Message, ...]:
    """ShareGPT `conversations`; a reply at the end is the data set's own, and is made anew.

    Raises:
        RequestError: Kind `schema`, `empty` or `unsupported`.
    """
    items = _list("conversations", value)
    turns = [_sharegpt_turn(f"conversations[{at}]", item) for at, item in enumerate(items)]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise RequestError("empty", "conversations has no human turn", "add one")
    return _spoken("conversations", tuple(turns))


def read_turns(value: object) -> tuple[Message, ...]:
    """A list of user turns, each to be answered before the next is asked.

    Raises:
        RequestError: Kind `schema` or `empty`.
    """
    items = _list("turns", value)
    for at, item in enumerate(items):
        if not isinstance(item, str):
            raise RequestError(
                "schema", f"turns[{at}] must be a string, got {type_name(item)}", "fix turns"
            )
        if not item:
            raise RequestError("empty", f"turns[{at}] holds no text", "give at least one character")
    return tuple({"role": "user", "content": item} for item in items)


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(
            "schema", f"{name} must be a list, got {type_name(value)}", f"fix {name}"
        )
    if not value:
        raise RequestError("empty", f"{name} is empty", "give at least one entry")
    return value


def _spoken(name: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if not any(message["content"] for message in messages):
        raise RequestError("empty", f"{name} holds no text", "give at least one character")
    return messages


def _message(where: str, item: object) -> Message:
    if not isinstance(item, dict):
        raise RequestError(
            "schema", f"{where} must be an object, got {type_name(item)}", "fix messages"
        )
    rest = dict(item)
    role, content = rest.pop("role", None), rest.pop("content", None)
    for name in _OTHER_FIELDS:
        if rest.pop(name, None):
            raise RequestError("unsupported", f"{where}.{name} is not supported", f"drop {name}")
    if rest:
        raise RequestError("schema", f"unknown field {where}.{next(iter(rest))}", "drop the field")
    if role in _OTHER_ROLES:
        raise RequestError(
            "unsupported", f"{where}.role {role!r} is not supported", f"use {', '.join(_ROLES)}"
        )
    if role not in _ROLES:
        raise RequestError(
            "schema", f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}", "fix role"
        )
    return {"role": role, "content": _content(where, content)}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            "schema", f"{where}.content must be a string, got {type_name(content)}", "fix content"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind != "text" and isinstance(kind, str):
            raise RequestError(
                "unsupported", f"{where} holds {kind!r}", "only text parts are served"
            )
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                "schema",
                f"{where}.content has a part that is not text",
                'write parts as {"type": "text", "text": "..."}',
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _sharegpt_turn(where: str, item: object) -> Message:
    if not isinstance(item, dict) or item.keys() != {"from", "value"}:
        raise RequestError(
            "schema", f"{where} must have exactly from and value", "fix conversations"
        )
    speaker, value = item["from"], item["value"]
    if not isinstance(value, str):
        raise RequestError(
            "schema", f"{where}.value must be a string, got {type_name(value)}", "fix conversations"
        )
    if speaker in _OTHER_ROLES:
        raise RequestError(
            "unsupported", f"{where}.from {speaker!r} is not supported", "use human, gpt, system"
        )
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise RequestError(
            "schema", f"{where}.from must be human, gpt or system, got {speaker!r}", "fix from"
        )
    return {"role": _SHAREGPT_ROLES[speaker], "content": value}
