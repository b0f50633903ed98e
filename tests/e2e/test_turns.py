"""Conversations of the packaged pair, through the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_cli.backend import load_tokenizer
from tests.e2e.test_demo import DEMO, heldout
from tests.helpers.command import run_command

COMMAND = ("generate", "in.jsonl", "--model", "demo", "--threads", "1", "--max-tokens", "96")


def write_rows(folder: Path, count: int) -> list[list[str]]:
    asked = [r["question"] for r in heldout()]
    turns = [asked[3 * at : 3 * at + 2 + at % 2] for at in range(count)]
    lines = [json.dumps({"id": f"r{at}", "turns": t}) for at, t in enumerate(turns)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    return turns


def generate(folder: Path, name: str, *args: str) -> list[dict[str, Any]]:
    done = run_command(*COMMAND, "-o", name, "--metrics-json", "m.json", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def test_a_turn_finds_the_one_before_it_in_the_cache(tmp_path: Path) -> None:
    ((first, second),) = write_rows(tmp_path, 1)
    (row,) = generate(tmp_path, "out.jsonl")
    one, two = row["turns"]
    tokenizer = load_tokenizer(DEMO / "target")
    user = {"role": "user", "content": first}
    reply = {"role": "assistant", "content": one["text"]}
    asked = tokenizer.encode_chat([user])
    prompt = tokenizer.encode_chat([user, reply, {"role": "user", "content": second}])
    said = [*asked, *one["token_ids"]]
    assert one["finish_reason"] == "stop"
    assert prompt[: len(said)] == said
    assert two["usage"]["prompt_tokens"] == len(prompt)
    # nothing else ran: what was cached is the turn before, its reply included
    cached = json.loads((tmp_path / "m.json").read_text())["speed"]["cached_prompt_tokens"]
    assert len(asked) < cached < len(said)


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_conversations_do_not_depend_on_the_batch(tmp_path: Path, temperature: str) -> None:
    write_rows(tmp_path, 6)
    (alone, batched) = (
        # how much is verified otherwise depends on the neighbours
        generate(
            tmp_path,
            f"{n}.jsonl",
            *("--max-num-seqs", n, "--temperature", temperature, "--verify", "all"),
        )
        for n in ("1", "4")
    )
    assert alone == batched
    assert {len(row["turns"]) for row in alone} == {2, 3}
    texts = {turn["text"] for row in alone for turn in row["turns"]}
    assert len(texts) > 12
