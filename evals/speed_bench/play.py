"""Conversations through the engine, turn by turn, the model's own replies fed back."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import DSparkError, RequestError
from engine.request import Completion, Request, RequestFailure, SamplingParams
from evals.speed_bench.layouts import Conversation

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """What playing needs of a tokenizer."""

    def encode_chat(
        self,
        messages: list[Message],
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the reply starts."""
        ...


class PlayEngine(Protocol):
    """What playing needs of an engine."""

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The target's."""
        ...

    def run(
        self, requests: Iterator[Request | None], *, speculate: bool, max_num_seqs: int | None
    ) -> Iterator[Completion | RequestFailure]:
        """Complete requests, pulling them as there is room; None means nothing yet, ask again."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaySettings:
    """How conversations are played."""

    params: SamplingParams
    first_turn_only: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    speculate: bool = True
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One user turn and what came of it."""

    conversation: Conversation
    turn: int
    """From 0."""

    result: Completion | RequestFailure

    @property
    def completion(self) -> Completion | None:
        """The reply, if there is one."""
        return self.result if isinstance(self.result, Completion) else None


@dataclass(slots=True)
class _State:
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    turn: int = 0


class Player:
    """Plays conversations; a turn is ready the moment the one before it is finished.

    The engine asks for requests while it has room, and again after a step if there were none yet.
    Turns that follow a reply come before new conversations, so that their prefix is still in the KV
    cache; conversations with many turns go first, so that no long one is left for the end.

    Args:
        engine: Runs the requests.
        conversations: What to play.
        settings: How.
    """

    def __init__(
        self, engine: PlayEngine, conversations: Sequence[Conversation], settings: PlaySettings
    ) -> None:
        self._engine = engine
        self._settings = settings
        longest_first = sorted(conversations, key=lambda c: -self._length(c))
        self._new = deque(_State(conversation) for conversation in longest_first)
        self._ready: deque[_State] = deque()
        self._waiting: dict[str, _State] = {}
        self._failed: deque[Turn] = deque()

    def _length(self, conversation: Conversation) -> int:
        return 1 if self._settings.first_turn_only else len(conversation.turns)

    @property
    def num_turns(self) -> int:
        """Turns to come if none fails."""
        return sum(self._length(s.conversation) for s in self._new)

    def play(self) -> Iterator[Turn]:
        """Yield every turn as it ends; a failed turn ends its conversation."""
        settings = self._settings
        for result in self._engine.run(
            self._requests(), speculate=settings.speculate, max_num_seqs=settings.max_num_seqs
        ):
            yield self._finish(result)
            yield from self._refused()
        yield from self._refused()

    def _refused(self) -> Iterator[Turn]:
        while self._failed:
            yield self._failed.popleft()

    def _requests(self) -> Iterator[Request | None]:
        """Requests as they become ready, None while all that are left wait for a reply."""
        while self._ready or self._new or self._waiting:
            if not (self._ready or self._new):
                yield None
                continue
            state = (self._ready or self._new).popleft()
            text = state.conversation.turns[state.turn]
            state.messages.append({"role": "user", "content": text})
            request = self._encode(state)
            if request is not None:
                self._waiting[request.request_id] = state
                yield request

    def _encode(self, state: _State) -> Request | None:
        settings = self._settings
        request_id = f"{state.conversation.id}/{state.turn}"
        try:
            ids = self._engine.tokenizer.encode_chat(
                state.messages, dict(settings.template_kwargs) or None, settings.chat_template
            )
        except DSparkError as error:
            kind = error.kind if isinstance(error, RequestError) else "schema"
            empty = Request(request_id=request_id, prompt_token_ids=(), params=settings.params)
            failure = RequestFailure(request=empty, kind=kind, message=str(error), retryable=False)
            self._failed.append(Turn(state.conversation, state.turn, failure))
            return None
        return Request(request_id=request_id, prompt_token_ids=tuple(ids), params=settings.params)

    def _finish(self, result: Completion | RequestFailure) -> Turn:
        state = self._waiting.pop(result.request.request_id)
        turn = Turn(state.conversation, state.turn, result)
        if isinstance(result, Completion) and state.turn + 1 < self._length(state.conversation):
            state.messages.append({"role": "assistant", "content": result.text})
            state.turn += 1
            self._ready.append(state)
        return turn


def in_order(turns: Sequence[Turn], conversations: Sequence[Conversation]) -> list[Turn]:
    """Turns in the order of `conversations`, then of turns."""
    place = {conversation.id: at for at, conversation in enumerate(conversations)}
    return sorted(turns, key=lambda t: (place[t.conversation.id], t.turn))
