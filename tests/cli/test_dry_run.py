"""`dspark generate --dry-run`: what a run would find, without its weights."""

import json

from tests.cli import fake
from tests.cli.conftest import Bench


def test_dry_run_counts_without_weights_and_writes_nothing(bench: Bench) -> None:
    long = {"prompt": "x" * fake.CONTEXT}
    bench.write([{"messages": [{"role": "user", "content": "hi"}]}, long, b"{", {"prompt": "ab"}])
    before = sorted(bench.folder.iterdir())
    result = bench.call(
        "generate",
        str(bench.input),
        "-m",
        str(bench.folder / "m"),
        "--dry-run",
        "--max-tokens",
        "5",
    )
    out = result.out.decode()
    assert result.code == 3
    assert "good            2" in out
    assert "longest 18" in out
    assert "line 2: too_long" in out
    assert "line 3: parse" in out
    assert out.endswith("as the model sees it:\nuser:hi\nassistant:\n")
    assert fake.FakeEngine.loads == 0
    assert sorted(bench.folder.iterdir()) == before


def test_dry_run_of_good_rows_is_0(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, {"prompt": "b"}])
    bench.generate("--dry-run")
    assert not bench.output.exists()


def test_ids_outside_the_vocabulary_are_found_before_a_run(bench: Bench) -> None:
    """A dry run found nothing, and the run failed every row, once it had loaded."""
    config = bench.folder / "m" / "config.json"
    config.write_text(json.dumps({"max_position_embeddings": 900, "vocab_size": 300}))
    rows = [{"prompt": "ab"}, {"prompt": "cd", "stop_token_ids": [300]}]
    bench.write([*rows, {"prompt_token_ids": [1, 300]}])
    out = bench.call("generate", str(bench.input), "-m", str(config.parent), "--dry-run").out
    assert b"line 2: schema: stop token id 300 is outside the vocabulary [0, 300)" in out
    assert b"line 3: schema: prompt token id 300 is outside the vocabulary [0, 300)" in out
    for dry in ((), ("--dry-run",)):
        text = bench.generate("--stop-token-id", "300", *dry, code=2).err
        assert "--stop-token-id 300 is outside the vocabulary [0, 300)" in text
    assert fake.FakeEngine.loads == 0
