"""From a row's bytes to what the engine needs: everything that can be done beside the loop."""

from dataclasses import dataclass
from threading import Lock
from typing import Any

from dspark_cli.journal import Entry, Journal, Status, row_key
from dspark_cli.reader import RawRow
from dspark_cli.rows import (
    Prompt,
    RowRequest,
    RowRules,
    TextTokenizer,
    encode_prompt,
    read_id,
    read_row,
)
from dspark_cli.sampling import effective
from dspark_cli.sharding import Shard
from engine.errors import RequestError
from engine.request import SamplingParams

Encoded = tuple[int, ...] | RequestError
"""A prompt's token ids, or why it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """What the job needs to know besides its parts."""

    rules: RowRules
    chat_template: str | None = None
    drafted: bool = False
    rerun: frozenset[str] = frozenset()
    max_model_len: int | None = None
    """As asked for; rows that were too long under another one get another look."""

    shard: Shard | None = None
    """Rows of other shards are passed over."""

    keep_results: bool = False
    keep_prompts: int = 0
    """Remember the text of this many prompts, to show them."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row, understood as far as possible."""

    raw: RawRow
    row_id: str | int | None
    """None if even that is not known."""

    row: RowRequest | RequestError
    keys: tuple[str, ...]
    """Of each of its lines in the journal; empty without a request."""

    encoded: Encoded | None
    """None if every line was found in the journal."""

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        ids = len(self.encoded) if isinstance(self.encoded, tuple) else 0
        return len(self.raw.data or b"") + 8 * ids


class Preparing:
    """Reads rows and tokenises prompts; may be called from several threads.

    Args:
        journal: Rows whose lines it holds are not tokenised.
        tokenizer: The target's.
        settings: See JobSettings.
    """

    def __init__(self, journal: Journal, tokenizer: TextTokenizer, settings: JobSettings) -> None:
        self._journal = journal
        self._tokenizer = tokenizer
        self._settings = settings
        self._encoding = Lock()

    def __call__(self, raw: RawRow) -> Prepared | None:
        """Prepare one row; None if it is another shard's."""
        row_id, fields, wrong = identify(raw)
        shard = self._settings.shard
        if shard is not None and not shard.holds(str(raw.index) if row_id is None else row_id):
            return None
        try:
            if wrong is not None:
                raise wrong
            row = read_row(fields, self._settings.rules)
        except RequestError as error:
            return Prepared(raw, row_id, error, (), None)
        identity, sampling = row.prompt.identity(), effective(row.params)
        keys = tuple(row_key(str(row_id), n, identity, sampling) for n in range(row.n))
        wanted = any(self.find(key, row.params) is None for key in keys)
        return Prepared(raw, row_id, row, keys, self.encode(row.prompt) if wanted else None)

    def find(self, key: str, params: SamplingParams) -> Entry | None:
        """What the journal holds of a line, if a run with `params` would give the same."""
        entry = self._journal.find(key)
        return entry if entry is not None and stands(entry, params, self._settings) else None

    def encode(self, prompt: Prompt) -> Encoded:
        """Tokenise; tokenizers are not made for two callers at once."""
        try:
            with self._encoding:
                return encode_prompt(prompt, self._tokenizer, self._settings.chat_template)
        except RequestError as error:
            return error


def identify(raw: RawRow) -> tuple[str | int | None, dict[str, Any], RequestError | None]:
    """A row's id and fields, as far as it has them, and what is wrong with it."""
    try:
        fields = raw.load()
        own_id = read_id(fields)
    except RequestError as error:
        return None, {}, error
    return str(raw.index) if own_id is None else own_id, fields, None


def stands(entry: Entry, params: SamplingParams, settings: JobSettings) -> bool:
    """Whether a recorded line is what a run with `params` would give."""
    rerun = settings.rerun
    if entry.status is Status.FAILED:
        return "failed" not in rerun
    if entry.status is Status.TOO_LONG:
        same = entry.limit == (settings.max_model_len or 0)
        # replies to earlier turns are part of the prompt: other limits make other lengths
        same &= entry.tokens in (0, params.max_tokens)
        return "failed" not in rerun and same
    if entry.status is Status.STOP:
        return entry.tokens <= params.max_tokens
    if "truncated" in rerun:
        return False
    by_context = entry.tokens < entry.limit
    return params.max_tokens == entry.limit or (by_context and entry.tokens <= params.max_tokens)
