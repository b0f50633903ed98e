"""Text to token ids and back, chat templates, and stop strings found token by token."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.errors import CheckpointError, RequestError

_NO_LIMIT = 10**30
_TAKEN = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    )
)
"""Names that rendering a chat sets itself, or transformers would take for its own."""

UNDECODED = "\ufffd"
"""What decoders put where bytes are not, or not yet, a character."""


class Tokenizer:
    """A checkpoint's tokenizer, as the rest of the engine uses it.

    Args:
        inner: A transformers tokenizer.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        added = inner.added_tokens_decoder
        self._special = {token for token, entry in added.items() if entry.special}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer in a checkpoint folder; never asks the network, runs no code from it.

        Args:
            folder: The checkpoint.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        if not any((folder / name).exists() for name in _TOKENIZER_FILES):
            raise CheckpointError(
                f"{folder} holds no tokenizer ({' or '.join(_TOKENIZER_FILES)})",
                "copy the tokenizer files of the checkpoint into the folder",
            )
        # slow to import: only when a tokenizer is needed
        from transformers import AutoTokenizer
        from transformers.utils import logging as theirs

        said = theirs.get_verbosity()
        # it also looks at the network's config, and warns of kinds it does not know
        theirs.set_verbosity(logging.ERROR)
        try:
            inner = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise CheckpointError(
                f"cannot read the tokenizer in {folder}: {error}",
                "download the checkpoint again, or install the package the message names",
            ) from error
        finally:
            theirs.set_verbosity(said)
        # the engine knows the context's length; transformers' own limit only prints warnings
        inner.model_max_length = _NO_LIMIT
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included."""
        return max(self._inner.get_vocab().values(), default=-1) + 1

    @property
    def num_base_tokens(self) -> int:
        """Size of the vocabulary proper, without tokens that were added to it."""
        return cast(int, self._inner.vocab_size)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token; the checkpoint's EOS ids are in its spec."""
        return cast(int | None, self._inner.eos_token_id)

    @property
    def has_chat_template(self) -> bool:
        """Does the checkpoint ship a chat template?"""
        return bool(self._inner.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Any text; special tokens written out in it become themselves.
            add_special_tokens: Let the tokenizer add its BOS and the like.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        try:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens))
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "schema", f"the prompt cannot be tokenised: {error}", "send valid Unicode text"
            ) from None

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation that the model is to continue.

        The template writes the special tokens, so none are added: at most one BOS.

        Args:
            messages: As `render_chat`.
            template_kwargs: As `render_chat`.
            chat_template: As `render_chat`.
        """
        text = self.render_chat(messages, template_kwargs, chat_template)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """A conversation as the text the model was trained on, up to where its answer starts.

        Args:
            messages: OpenAI-style messages, `role` and `content`.
            template_kwargs: Passed to the template, e.g. `enable_thinking`.
            chat_template: Jinja text to use instead of the checkpoint's.

        Raises:
            RequestError: There is no template, or it rejects the messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise RequestError(
                "unsupported",
                "the model's tokenizer has no chat template, and the row has messages",
                "give prompts instead of messages, or a chat template",
            )
        if clash := clashing_names(template_kwargs or {}):
            raise RequestError(
                "schema",
                f"chat template kwargs may not be named {', '.join(clash)}: the template is given "
                "these already",
                "leave them out of chat_template_kwargs",
            )
        from jinja2 import TemplateError

        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **dict(template_kwargs or {}),
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                "schema",
                f"the chat template rejects the messages: {error}",
                "write messages as the model's chat template expects them",
            ) from None
        return cast(str, text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids: special tokens skipped, spaces as they are."""
        text = self._inner.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id; None when there is none."""
        return cast(str | None, self._inner.convert_ids_to_tokens(token_id))

    def is_silent(self, token_id: int) -> bool:
        """Does `decode` drop this token: special, or not in the vocabulary?"""
        return token_id in self._special or self.token(token_id) is None

    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""
        return cast(dict[str, int], self._inner.get_vocab())

    def fingerprint(self) -> str:
        """Hash of the vocabulary and the chat template: equal prompts give equal ids."""
        template = json.dumps(self._inner.chat_template, sort_keys=True)
        entries = sorted(self.vocabulary().items(), key=lambda item: (item[1], item[0]))
        digest = hashlib.sha256(json.dumps([entries, template]).encode())
        return digest.hexdigest()[:32]


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def clashing_names(template_kwargs: Mapping[str, Any]) -> list[str]:
    """Template variables that rendering sets itself, and that nobody else may set."""
    return sorted(_TAKEN & set(template_kwargs))


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where an output ends."""

    stop: str
    """The stop string found."""

    text_end: int
    """Where it starts: the final text is `decode(ids)[:text_end]`, ids being all tokens pushed."""


class StopMatcher:
    """Finds the first stop string in a growing output.

    After every token the whole output so far counts, as `decode` gives it, except undecoded bytes
    at its end: they may still become a character. The match is the one that is complete first in
    the text, as if it had come character by character; of those ending together, the longest. So it
    does not depend on how the text was cut into tokens.

    The cost of a token does not grow with the output. Only a window of recent tokens is decoded,
    and of the text before it only as much is kept as a stop string could reach back. Since decoders
    look at their neighbours (a first token loses its space, bytes join to characters), the window
    moves on only where that can be shown to leave the later text as it was. A stop string that
    itself contains U+FFFD may be missed: the text it is part of can still change.

    Args:
        tokenizer: Decodes the output.
        stops: Non-empty stop strings; none: nothing is ever found.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._reach = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._window: list[int] = []
        self._skip = 0  # characters of the window's text that `_before` already holds
        self._before = ""

    def push(self, token_id: int) -> StopMatch | None:
        """Take the next output token.

        Args:
            token_id: The token.

        Returns:
            The stop string that this token completes, or None.
        """
        if not self._stops:
            return None
        self._ids.append(token_id)
        if self._tokenizer.is_silent(token_id):
            return None
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        match = None
        if first_stop(self._before + text[self._skip :], self._stops) is not None:
            # offsets are those of the whole output, which a window cannot know
            match = first_stop(self._tokenizer.decode(self._ids), self._stops)
        if len(self._window) % _WINDOW == 0:  # not at every token: it may fail again and again
            self._shorten(text)
        return match

    def _shorten(self, text: str) -> None:
        """Drop the older half of the window, where the rest still decodes to the same text."""
        for drop in range(len(self._window) // 2, 0, -1):
            rest = self._window[drop:]
            tail = self._tokenizer.decode(rest)
            head = self._settled_head(rest, tail)
            new = tail[len(head) :]
            if head and text.endswith(new):
                self._move(drop, len(head), len(text) - len(new), text)
                return
        if len(self._window) >= _MOST_WINDOW:
            # Undecodable bytes without end: what they hide is at most the last character.
            drop = len(self._window) - _WINDOW // 2
            tail = self._tokenizer.decode(self._window[drop:])
            settled = len(tail.rstrip(UNDECODED))
            self._move(drop, settled, len(text) - (len(tail) - settled), text)

    def _settled_head(self, ids: list[int], text: str) -> str:
        """Text of the first tokens that later ones cannot change; "" when there is none.

        With some text of its own a first token has lost all the spaces it will lose, and a head
        that ends in a whole character takes no bytes of the next.
        """
        for count in range(1, min(len(ids), _MOST_CONTEXT + 1)):
            head = self._tokenizer.decode(ids[:count])
            if head and not head.endswith(UNDECODED) and text.startswith(head):
                return head
        return ""

    def _move(self, drop: int, skip: int, end: int, text: str) -> None:
        """Start the window `drop` tokens later; `_before` takes what lies before `end`."""
        self._before = (self._before + text[self._skip : end])[-self._reach :]
        self._window, self._skip = self._window[drop:], skip


_WINDOW = 24
"""Tokens in the window before it is cut in half."""

_MOST_WINDOW = 96
"""Tokens in the window before it is cut whatever the decoder says."""

_MOST_CONTEXT = 8
"""Tokens looked at for a whole character: one has four bytes at most, so four tokens."""


def first_stop(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first; of those ending together, the longest.

    Args:
        text: Text; undecoded bytes at its end are not looked at.
        stops: Non-empty strings.
    """
    text = text.rstrip(UNDECODED)
    found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return StopMatch(stop, start)
