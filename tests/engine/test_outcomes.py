"""What is said of requests that cannot be served."""

import pytest

from engine.errors import RequestError
from engine.outcomes import check_request
from engine.request import Request


@pytest.mark.parametrize(
    ("trained", "hint"),
    [
        (None, "shorten it to 7 tokens, or raise --max-model-len"),
        (16, "shorten it to 7 tokens, or raise --max-model-len"),
        (8, "shorten it to 7 tokens"),  # more was refused then
    ],
)
def test_a_larger_context_is_proposed_where_there_can_be_one(
    trained: int | None, hint: str
) -> None:
    request = Request(request_id="a", prompt_token_ids=(1,) * 8)
    with pytest.raises(RequestError, match="the prompt has 8 tokens") as info:
        check_request(request, 8, 100, trained)
    assert info.value.hint == hint
