"""Thirty ways in which a row can be wrong, ten lines of each, with the class each must get."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.cli.fake import CONTEXT

PER_KIND = 10


@dataclass(frozen=True)
class Kind:
    """One way to be wrong; `line(at)` is its `at`-th example."""

    name: str
    expected: str
    line: Callable[[int], bytes]


def _json(make: Callable[[int], Any]) -> Callable[[int], bytes]:
    return lambda at: json.dumps(make(at)).encode()


def _row(**fields: Any) -> Callable[[int], bytes]:
    return _json(lambda at: {"id": f"{sorted(fields)}-{at}", "prompt": "x", **fields})


def _each(name: str, values: list[Any]) -> Callable[[int], bytes]:
    return _json(lambda at: {"prompt": "x", name: values[at % len(values)]})


def _prompts(values: list[Any]) -> Callable[[int], bytes]:
    return _json(lambda at: {"prompt": values[at % len(values)]})


def _messages(values: list[Any]) -> Callable[[int], bytes]:
    return _json(lambda at: {"messages": values[at % len(values)]})


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


_EMPTY: list[dict[str, Any]] = [
    {"prompt": ""},
    {"messages": []},
    {"turns": []},
    {"prompt_token_ids": []},
    {"messages": [_user("")]},
]
_NOT_IDS = [-1, 257, 1.5, "a", None]
_NOT_MESSAGES = ["hi", {"role": "user"}, ["hi"], [_user(5)], [_user(None)]]
_WHOLE = b'{"prompt": "hello", "seed": 1}'
_TYPOS = ["promt", "temprature", "max_token", "top-p", "message", "stops", "Seed", "x", "", "ids"]
_UNSUPPORTED: list[dict[str, Any]] = [
    {"logprobs": True},
    {"logprobs": 5},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"50": -100}},
    {"stream": True},
    {"lora_request": "a"},
    {"min_tokens": 3},
]
_RANGES: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -2},
    {"min_p": 2},
    {"seed": -1},
    {"seed": 2**63},
    {"max_tokens": 0},
    {"n": 0},
    {"stop": ["a", ""]},
]


def _batch(at: int, **changes: Any) -> bytes:
    line: dict[str, Any] = {
        "custom_id": f"batch-{at}-{sorted(changes)}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [_user("hi")]},
    }
    return json.dumps(line | changes).encode()


KINDS = [
    Kind("cut off JSON", "parse", lambda at: _WHOLE[: 2 + 2 * at]),
    Kind("trailing junk", "parse", lambda at: _WHOLE + b"}]x,0\"'n:{"[at : at + 1]),
    Kind("single quotes", "parse", lambda at: b"{'prompt': 'row %d'}" % at),
    Kind("NaN and Infinity", "parse", lambda at: b'{"prompt": "x%d", "top_p": NaN}' % at),
    Kind("number too large", "parse", lambda at: b'{"prompt": "x", "seed": 1e%d}' % (400 + at)),
    Kind("key twice", "parse", lambda at: b'{"prompt": "a", "prompt": "b%d"}' % at),
    Kind("key twice within", "parse", lambda at: b'{"input": {"k": %d, "k": 1}}' % at),
    Kind("half a pair", "parse", lambda at: b'{"prompt": "x \\ud8%02x y"}' % at),
    Kind("not UTF-8", "parse", lambda at: b'{"prompt": "caf\xe9 %d"}' % at),
    Kind("control character", "parse", lambda at: b'{"prompt": "a%cb"}' % (1 + at % 8)),
    Kind("too deep", "parse", lambda at: b'{"prompt": ' + b"[" * (100_000 + at) + b"}"),
    Kind("huge integer", "parse", lambda at: b'{"seed": ' + b"9" * (5000 + at) + b"}"),
    Kind("not an object", "schema", _json(lambda at: [[at], "text", 12, None, True][at % 5])),
    Kind("no prompt", "schema", _json(lambda at: {"id": f"none-{at}"})),
    Kind("two prompts", "schema", _json(lambda at: {"prompt": f"x{at}", "messages": [_user("x")]})),
    Kind("prompt type", "schema", _prompts([123, True, 1.5, ["a"], {"a": 1}])),
    Kind("unknown field", "schema", _json(lambda at: {"prompt": "x", _TYPOS[at]: 1})),
    Kind("sampling type", "schema", _each("temperature", ["0", True, [], {}, "hot"])),
    Kind("boolean as integer", "schema", _each("max_tokens", [True, False])),
    Kind("out of range", "schema", _json(lambda at: {"prompt": "x", **_RANGES[at]})),
    Kind("id type", "schema", _each("id", [1.5, True, [], {}, ""])),
    Kind("role", "schema", _messages([[{"role": "robot", "content": "x"}], [{"content": "x"}]])),
    Kind("messages type", "schema", _messages(_NOT_MESSAGES)),
    Kind("token ids", "schema", _json(lambda at: {"prompt_token_ids": [1, _NOT_IDS[at % 5]]})),
    Kind("template refuses", "schema", _messages([[_user("TEMPLATE_RAISES")]])),
    Kind("empty", "empty", _json(lambda at: _EMPTY[at % 5])),
    Kind("too long", "too_long", _json(lambda at: {"prompt": "x" * (CONTEXT + at)})),
    Kind("unsupported field", "unsupported", _json(lambda at: {"prompt": "x", **_UNSUPPORTED[at]})),
    Kind("images, tools, replies", "unsupported", _messages([
        [_user([{"type": "image_url", "image_url": {"url": "x"}}])],
        [_user("x"), {"role": "tool", "content": "y"}],
        [_user("x"), {"role": "assistant", "content": "y"}],
        [_user("x") | {"name": "Ann"}],
    ])),
    Kind("batch url", "unsupported", lambda at: _batch(at, url=f"/v1/embeddings/{at}")),
]  # fmt: skip
