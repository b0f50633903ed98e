"""Data sets by their Hub id, through the real `datasets` library and a Hub on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.evals.conftest import gsm8k_lines
from tests.helpers.hub import Hub, serve

pytest.importorskip("datasets")

ROOT = Path(__file__).parents[2]
NAME = "openai/gsm8k"
TRAIN = [{"question": f"T{k}?", "answer": f"so\n#### {k}"} for k in range(8)]
TEST = [{"question": f"Q{k}?", "answer": f"so\n#### {k}"} for k in range(5)]


MANY = """
import json, sys
from dspark_cli.main import run
for args in json.load(sys.stdin):
    try:
        run(args)
    except SystemExit as end:
        sys.stderr.write(f"exit {end.code}\\n\\f")
"""
"""Commands one after the other: importing `datasets` takes a second."""


class Caller:
    """Scores one text for each row of the default data set; keeps one cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.err = ""
        texts = folder / "texts.jsonl"
        texts.write_text('{"index": 0, "text": "#### 0"}\n{"index": 3, "text": "#### 4"}\n')
        self._given = ["--rescore", str(texts), "--out", str(folder / "out"), "--overwrite"]

    def score(self, *more: str, code: int = 0, **env: str) -> dict[str, Any]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        env = {**clean, "HF_HOME": str(self.folder / "cache"), "PYTHONPATH": str(ROOT), **env}
        command = [sys.executable, "-m", "dspark_cli", "eval", "gsm8k", *self._given, *more]
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True)
        self.err = done.stderr
        assert done.returncode == code, done.stderr
        if code:
            return {}
        found: dict[str, Any] = json.loads((self.folder / "out" / "summary.json").read_text())
        return found

    def refused(self, cases: Sequence[str], **env: str) -> list[list[str]]:
        """Lines on stderr of each data set's command, the exit code last."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        env = {**clean, "HF_HOME": str(self.folder / "cache"), "PYTHONPATH": str(ROOT), **env}
        commands = [["eval", "gsm8k", *self._given, "--data", case] for case in cases]
        done = subprocess.run(
            [sys.executable, "-c", MANY],
            env=env,
            cwd=self.folder,
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            check=True,
        )
        return [said.strip().splitlines() for said in done.stderr.split("\f")[:-1]]


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def test_the_default_data_come_from_the_hub_and_then_from_the_cache(caller: Caller) -> None:
    with serve(Hub(NAME, TRAIN, TEST)) as hub:
        found = caller.score(HF_ENDPOINT=hub.url)
    assert f"GET /datasets/{NAME}/resolve/{'a' * 40}/main/test-00000-of-00001.parquet" in hub.asked
    assert found["data"]["name"] == f"{NAME}@main:test"
    assert (found["data"]["rows"], found["rows"], found["correct"]) == (5, 2, 1)
    # rows of another number are told, and the score is said not to compare
    assert "not the GSM8K test set (5 rows, not 1319" in caller.err
    digest = found["data"]["content_sha256"]
    again = caller.score(HF_HUB_OFFLINE="1")
    assert again["data"]["content_sha256"] == digest
    assert (again["rows"], again["correct"]) == (2, 1)


def test_the_published_rows_are_known_from_the_hub_too(caller: Caller) -> None:
    # parquet, arrow and JSON lines of the same rows have one content hash
    rows = gsm8k_lines("test")
    with serve(Hub(NAME, TRAIN, rows)) as hub:
        found = caller.score(HF_ENDPOINT=hub.url)
    assert found["data"]["known_as"] == "test"
    assert "the GSM8K test set, 1319 rows, content as published" in caller.err
    changed = [{**rows[0], "answer": rows[0]["answer"] + "9"}, *rows[1:]]
    with serve(Hub(NAME, TRAIN, changed)) as hub:
        caller.score(HF_ENDPOINT=hub.url, HF_HOME=str(caller.folder / "another cache"))
    assert "1319 rows as in the GSM8K test set, but other content" in caller.err


def test_shots_are_the_training_split(caller: Caller) -> None:
    with serve(Hub(NAME, TRAIN, TEST)) as hub:
        found = caller.score("--preset", "vllm", HF_ENDPOINT=hub.url)
    example = found["example_prompt"]["text"]
    assert example.startswith("Question: T0?\nAnswer: so\n#### 0\n\nQuestion: T1?")
    assert example.endswith("Question: T4?\nAnswer: so\n#### 4\n\nQuestion: Q0?\nAnswer:")


def test_without_network_and_cache_it_is_a_usage_error(caller: Caller) -> None:
    caller.score(code=2, HF_HUB_OFFLINE="1")
    *_, error, hint = caller.err.strip().splitlines()
    assert error.startswith(f"error: {NAME}@main:test is neither a file nor a data set that loads:")
    assert "Couldn't reach" in error
    assert hint.startswith("hint: check the name, NAME/NAME[@CONFIG][:SPLIT], and the network; or")


def test_what_the_hub_does_not_have(caller: Caller) -> None:
    cases = {
        f"{NAME}@main:validation": "Unknown split",
        f"{NAME}@socratic:test": "socratic",
        "openai/other@main:test": "openai/other",
    }
    with serve(Hub(NAME, TRAIN, TEST)) as hub:
        found = caller.refused(list(cases), HF_ENDPOINT=hub.url)
    for (given, why), (*_, error, hint, code) in zip(cases.items(), found, strict=True):
        assert code == "exit 2"
        assert error.startswith(f"error: {given} is neither a file nor a data set that loads")
        assert why in error
        assert hint.startswith("hint: ")
