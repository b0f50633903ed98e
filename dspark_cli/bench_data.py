"""Prompts of `dspark bench throughput`."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from dspark_cli.bench_settings import ThroughputOptions
from dspark_cli.reader import RawRow, Rows, open_sources
from dspark_cli.rows import PROMPT_FIELDS, RowRules, TextTokenizer, encode_prompt, read_row
from engine.errors import ConfigError, RequestError
from engine.request import Request
from evals.speed_bench.placeholders import is_placeholder


class BenchTokenizer(TextTokenizer, Protocol):
    """What making prompts needs of a tokenizer."""

    def is_silent(self, token_id: int) -> bool:
        """Is it a special token, or none at all?"""
        ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests to measure with."""

    name: str
    requests: tuple[Request, ...]
    sha256: str
    """Digest of the prompts' token ids, in order."""

    notes: tuple[str, ...] = ()


def make_prompts(
    given: ThroughputOptions, rules: RowRules, template: str | None, tokenizer: BenchTokenizer
) -> Prompts:
    """The first rows, as many as the largest batch needs.

    Args:
        given: The options.
        rules: What they say about rows.
        template: What --chat-template holds.
        tokenizer: The target's.

    Raises:
        ConfigError: There are no rows, or one of them cannot be served.
    """
    want = given.num_prompts or max(8, 4 * given.widths[-1])
    notes: tuple[str, ...] = ()
    if given.is_random:
        requests = _random(want, given, rules, tokenizer)
    else:
        requests, notes = read_prompts(want, given.data_name, rules, template, tokenizer)
    digest = hashlib.sha256()
    for request in requests:
        digest.update(repr(request.prompt_token_ids).encode())
    return Prompts(given.data_name, tuple(requests), digest.hexdigest()[:32], notes)


def _random(
    want: int, given: ThroughputOptions, rules: RowRules, tokenizer: BenchTokenizer
) -> list[Request]:
    rng = random.Random(given.seed)
    usable = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_silent(token)]
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=tuple(rng.choice(usable) for _ in range(given.prompt_tokens)),
            params=rules.params,
        )
        for index in range(want)
    ]


def read_prompts(
    want: int | None, name: str, rules: RowRules, template: str | None, tokenizer: TextTokenizer
) -> tuple[list[Request], tuple[str, ...]]:
    """First turns of the rows of a file.

    Args:
        want: How many; None: all.
        name: As `dspark generate` takes it, or demo.
        rules: What holds for rows.
        template: What --chat-template holds.
        tokenizer: The target's.

    Returns:
        Requests, and notes for people.

    Raises:
        ConfigError: There are no rows, or one of them cannot be served.
    """
    rows = Rows(open_sources(str(_demo()) if name == "demo" else name), want)
    rules = replace(rules, passthrough=True)  # labels and answers of a data set are no mistakes
    requests: list[Request] = []
    cut = 0
    for raw in rows:
        try:
            row = raw.load()
            shortened = _first_turn(row)
            cut += shortened
            requests.append(_request(raw, row, rules, template, tokenizer))
        except RequestError as error:
            where = f"{raw.source} line {raw.line}"
            raise ConfigError(f"{where}: {error}", error.hint) from None
    if not requests:
        raise ConfigError(f"no rows in {name}", "write one JSON object a line")
    return requests, ((f"first turns only: {cut} rows have more",) if cut else ())


def _request(
    raw: RawRow,
    row: dict[str, Any],
    rules: RowRules,
    template: str | None,
    tokenizer: TextTokenizer,
) -> Request:
    read = read_row(row, rules)
    if read.n != 1:
        raise RequestError(
            "unsupported",
            f"n is {read.n}, and here a row has one completion",
            "leave out n, in the rows that are given here",
        )
    ids = encode_prompt(read.prompt, tokenizer, template)
    return Request(request_id=str(raw.index), prompt_token_ids=ids, params=read.params)


def _first_turn(row: dict[str, Any]) -> bool:
    """Bring rows of known data sets into a form that `generate` reads; were turns dropped?"""
    turns, messages = row.get("turns"), row.get("messages")
    if not any(row.get(name) is not None for name in PROMPT_FIELDS) and "question" in row:
        row["messages"] = [{"role": "user", "content": row.pop("question")}]
        return False
    if isinstance(turns, str):
        turns = row["turns"] = [turns]
    texts: Sequence[Any] = turns if isinstance(turns, list) else ()
    users_only = isinstance(messages, list) and all(
        isinstance(m, dict) and m.get("role") == "user" for m in messages
    )
    if users_only and messages:
        texts = [message.get("content") for message in messages]
    if is_placeholder([text for text in texts[:1] if isinstance(text, str)]):
        raise RequestError(
            "schema", "the row is a placeholder", "fill it: dspark data speed-bench prepare"
        )
    if len(texts) < 2:
        return False
    name = "turns" if isinstance(turns, list) else "messages"
    row[name] = row[name][:1]
    return True


def _demo() -> Path:
    try:
        path = Path(str(files("dspark_demo"))) / "heldout.jsonl"
    except ModuleNotFoundError:
        path = None
    if path is None or not path.exists():
        raise ConfigError("this installation has no demo prompts", "give --data FILE")
    return path
