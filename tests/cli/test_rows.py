"""Row formats: every accepted shape becomes the request it means."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_cli import jsonl
from dspark_cli.parsers import size
from dspark_cli.rows import PROMPT_FIELDS, RowRules, read_id, read_row
from dspark_cli.sampling import SAMPLING_FIELDS, UNSUPPORTED
from engine.errors import RequestError
from engine.request import SamplingParams

RULES = RowRules(params=SamplingParams())
HI = {"role": "user", "content": "hi"}


def read(**row: Any) -> Any:
    return read_row(row, RULES).prompt


def refused(row: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as info:
        read_row(row, RULES)
    return info.value


def error_of(action: Callable[[], object]) -> RequestError | None:
    try:
        action()
    except RequestError as error:
        return error
    return None


def test_plain_formats() -> None:
    assert read(prompt="a").text == "a"
    assert read(prompt_token_ids=[1, 2]).token_ids == (1, 2)
    assert read(messages=[HI]).messages == (HI,)
    assert read(turns=["hi"]).messages == (HI,)
    assert read(prompt=None, messages=[HI]).messages == (HI,)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "a\nb"


def test_null_message_fields_are_nothing() -> None:
    message = {"role": "user", "content": "hi", "tool_calls": None, "name": None}
    assert read(messages=[message]).messages == (HI,)


def test_sharegpt_drops_the_reply_it_is_to_make() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "human", "value": "r"},
        {"from": "gpt", "value": "b"},
    ]
    messages = read(conversations=turns).messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert refused({"conversations": turns[2:3]}).kind == "empty"


def test_turns_are_asked_one_after_another() -> None:
    prompt = read(turns=["a", "b", "c"])
    assert prompt.messages == ({"role": "user", "content": "a"},)
    then = prompt.then("x").then("y")
    assert [(m["role"], m["content"]) for m in then.messages] == [
        *(("user", "a"), ("assistant", "x"), ("user", "b"), ("assistant", "y"), ("user", "c"))
    ]
    assert then.later == ()
    assert prompt.identity() != read(turns=["a", "b"]).identity()
    assert (
        read(turns=["a"]).identity() == read(messages=[{"role": "user", "content": "a"}]).identity()
    )
    assert "turns[1]" in str(refused({"turns": ["a", ""]}))
    assert refused({"turns": ["a", 1]}).kind == "schema"


def test_an_id_cannot_pose_as_another_rows_turn() -> None:
    with pytest.raises(RequestError, match="NUL"):
        read_id({"id": "a\0turn 2"})


def test_openai_chat_line() -> None:
    row = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [HI], "max_completion_tokens": 5, "n": 2, "user": "u"},
    }
    request = read_row(row, RULES)
    assert read_id(row) == "c"
    assert request.prompt.messages == (HI,)
    assert (request.params.max_tokens, request.n) == (5, 2)


def test_openai_text_line_is_never_wrapped_in_a_chat() -> None:
    row = {"custom_id": "c", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}}
    assert read_row(row, RowRules(params=SamplingParams(), chat=True)).prompt.text == "a"


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"custom_id": "c", "url": "/v1/chat/completions"}, "schema"),
        ({"body": "x"}, "schema"),
        ({"body": {"messages": [HI]}, "method": "GET"}, "unsupported"),
        ({"body": {"prompt": "x"}, "url": "/v1/chat/completions"}, "schema"),
        ({"body": {"messages": [HI], "foo": 1}}, "schema"),
        ({"body": {"messages": [HI]}, "foo": 1}, "schema"),
        ({"body": {"messages": [HI], "model": 5}}, "schema"),
    ],
)
def test_wrong_openai_lines(row: dict[str, Any], kind: str) -> None:
    assert refused(row).kind == kind


def test_hint_names_the_near_field() -> None:
    error = refused({"prompt": "a", "temprature": 1})
    assert "did you mean temperature?" in error.hint
    assert "--passthrough" in error.hint


def test_template_kwargs_without_a_template_are_refused() -> None:
    assert refused({"prompt": "a", "chat_template_kwargs": {"x": 1}}).kind == "schema"


def test_limits_that_disagree_are_refused() -> None:
    row = {"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}
    assert refused(row).kind == "schema"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields_pass_only_when_they_ask_for_nothing(name: str) -> None:
    assert refused({"prompt": "a", name: {"some": "thing"}}).kind == "unsupported"
    for nothing in (None, *UNSUPPORTED[name][0]):
        assert read_row({"prompt": "a", name: nothing}, RULES).n == 1


def test_false_is_not_zero() -> None:
    assert refused({"prompt": "a", "presence_penalty": False}).kind == "unsupported"
    assert refused({"prompt": "a", "logprobs": 0}).kind == "unsupported"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
fields = st.sampled_from(
    [
        *PROMPT_FIELDS,
        *("id", "custom_id", "body", "url", "chat_template_kwargs", "metadata"),
        *SAMPLING_FIELDS,
        *UNSUPPORTED,
    ]
)


@given(st.dictionaries(fields, json_values, max_size=4))
def test_any_row_is_a_request_or_an_error_with_a_class(row: dict[str, Any]) -> None:
    error = error_of(lambda: (read_id(row), read_row(row, RULES)))
    assert error is None or (error.kind in {"schema", "empty", "unsupported"} and error.hint)


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_an_error(data: bytes) -> None:
    error = error_of(lambda: jsonl.loads(data))
    assert error is None or error.kind in {"parse", "schema"}


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=4))
def test_written_lines_are_one_line_and_read_back(value: dict[str, Any]) -> None:
    line = jsonl.dumps(value)
    assert len(line.decode("utf-8").splitlines()) == 1
    assert jsonl.loads(line) == json.loads(line)


@pytest.mark.parametrize(
    ("text", "value"),
    [("32k", 32768), ("4096", 4096), ("4G", 1 << 32), ("4GiB", 1 << 32), ("1.5m", 3 << 19)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value
