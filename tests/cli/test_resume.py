"""A second run: what is kept, what is made again, what is refused."""

import json
import re
import shutil

import pytest

from tests.cli import fake
from tests.cli.conftest import Bench

ROWS = [{"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(12)]


def made(bench: Bench) -> list[str]:
    """Ids of the rows in the journal, in order."""
    records = [json.loads(line) for line in bench.journal.read_bytes().splitlines()]
    return [(r.get("row") or r["error"])["id"] for r in records if r["type"] in ("row", "error")]


def test_same_command_again_does_nothing_and_is_0(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    output, journal = bench.output.read_bytes(), bench.journal.read_bytes()
    result = bench.generate()
    assert fake.FakeEngine.loads == 1
    assert "nothing left to do" in result.err
    assert bench.output.read_bytes() == output
    assert bench.journal.read_bytes() == journal


def test_lost_output_is_written_again_from_the_journal(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    output = bench.output.read_bytes()
    bench.output.unlink()
    bench.generate()
    assert bench.output.read_bytes() == output
    assert fake.FakeEngine.loads == 1


def test_edited_and_new_rows_run_others_do_not(bench: Bench) -> None:
    # hermes-agent#95346, NeMo-Skills: resuming by row position mixes rows up after an edit
    bench.write(ROWS)
    bench.generate()
    rows = [{"id": "new", "prompt": "first now"}, *ROWS[1:]]
    rows[5] = {**rows[5], "prompt": "edited"}
    rows[6] = {**rows[6], "temperature": 0.5}
    rows[7] = {**rows[7], "temperature": 0.0}
    bench.write(rows)
    bench.generate()
    assert sorted(made(bench)[12:]) == ["new", "r5", "r6"]
    assert [row["id"] for row in bench.rows()] == [row["id"] for row in rows]
    assert [row["index"] for row in bench.rows()] == list(range(12))
    clean = bench.output.read_bytes()
    bench.generate("--overwrite")
    assert bench.output.read_bytes() == clean


def test_equal_prompts_are_all_kept(bench: Bench) -> None:
    # hermes-agent#86523: resuming by text dropped legal duplicates
    bench.write([{"id": at, "prompt": "same"} for at in range(4)])
    bench.generate()
    bench.generate()
    assert [row["id"] for row in bench.rows()] == [0, 1, 2, 3]


def test_longer_input_keeps_what_is_done(bench: Bench) -> None:
    bench.write(ROWS[:5])
    bench.generate()
    bench.write(ROWS)
    bench.generate()
    assert sorted(made(bench)) == sorted(row["id"] for row in ROWS)
    assert len(bench.rows()) == 12


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--temperature", "0.7"], ["temperature: 0.0 then, 0.7 now"]),
        (["--dtype", "bfloat16"], ["dtype: 'auto' then, 'bfloat16' now"]),
        (["--seed", "1", "--top-p", "0.5"], ["seed", "top-p"]),
        (["--stop", "x"], ["stop"]),
        (["--chat"], ["chat"]),
        (["--chat-template-kwargs", '{"a": 1}'], ["chat-template-kwargs"]),
    ],
)
def test_other_settings_are_refused_by_name(
    bench: Bench, args: list[str], names: list[str]
) -> None:
    bench.write(ROWS)
    bench.generate()
    journal = bench.journal.read_bytes()
    result = bench.generate(*args, code=2)
    for name in names:
        assert name in result.err
    assert "--force-resume" in result.err
    assert bench.journal.read_bytes() == journal
    bench.generate(*args, "--force-resume")
    bench.generate(*args)


def test_a_run_that_never_completed_a_row_binds_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark_cli import backend
    from engine.errors import CapacityError

    def no_memory(*_: object) -> None:
        raise CapacityError("the weights do not fit", "use --dtype bfloat16")

    bench.write([*ROWS, b"{"])
    with monkeypatch.context() as patch:
        patch.setattr(backend, "load_engine", no_memory)
        result = bench.generate("--dtype", "float32", code=1)
    assert result.err.endswith("error: the weights do not fit\nhint: use --dtype bfloat16\n")
    bench.generate("--dtype", "bfloat16", code=3)


def test_another_model_is_refused(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    (bench.folder / "m" / "model.safetensors").write_bytes(b"tuned" * 200)
    text = bench.generate(code=2).err
    name = re.escape(str(bench.folder / "m"))
    assert re.search(rf"model: '{name} \([0-9a-f]+\)' then, '{name} \([0-9a-f]+\)' now", text)
    result = bench.generate("--force-resume")
    assert fake.FakeEngine.loads == 1
    assert "changed since the output was begun: model" in result.err


def test_drafter_and_batch_size_only_warn(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    result = bench.generate("-g", "3", "--max-num-seqs", "2")
    assert "num-speculative-tokens: not given then, 3 now" in result.err
    assert "max-num-seqs" in result.err
    assert fake.FakeEngine.loads == 1


def test_resolved_dtype_is_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # a run begun on one device must not go on in another dtype because both say `auto`
    from dataclasses import replace

    from dspark_cli import backend

    def resolving(dtype: str) -> None:
        monkeypatch.setattr(
            backend,
            "load_engine",
            lambda config, progress: fake.FakeEngine(replace(config, dtype=dtype), progress),
        )

    bench.write(ROWS[:3])
    resolving("float32")
    bench.generate()
    bench.write(ROWS)
    resolving("bfloat16")
    assert "dtype: 'float32' then, 'bfloat16' now" in bench.generate(code=2).err
    resolving("float32")
    bench.generate()


def test_output_without_a_journal_is_not_touched(bench: Bench) -> None:
    # ogx#5643: resuming overwrote earlier results
    bench.write(ROWS)
    bench.output.write_text("precious\n")
    assert "--overwrite" in bench.generate(code=2).err
    assert "--overwrite" in bench.generate("--no-resume", code=2).err
    assert bench.output.read_text() == "precious\n"
    bench.generate("--overwrite")
    assert len(bench.rows()) == 12


def test_no_resume_does_not_throw_a_journal_away(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    bench.output.unlink()
    assert "--overwrite" in bench.generate("--no-resume", code=2).err
    bench.generate("--no-resume", "--overwrite")
    assert fake.FakeEngine.loads == 2


def test_failed_rows_stay_failed_until_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # hermes-agent#93527: rejected rows were paid for again on each resume
    bench.write(
        [*ROWS, {"id": "oom", "prompt": "FAIL_oom"}, {"id": "bug", "prompt": "FAIL_engine"}]
    )
    bench.generate(code=3)
    assert [(e["id"], e["class"], e["retryable"]) for e in bench.errors()] == [
        ("oom", "oom", True),
        ("bug", "engine", False),
    ]
    assert "2 lines failed (1 oom, 1 engine)" in bench.generate(code=3).err
    assert fake.FakeEngine.loads == 1
    monkeypatch.setenv("FAKE_HEALED", "1")
    bench.generate("--rerun", "failed")
    assert sorted(made(bench)[14:]) == ["bug", "oom"]
    assert len(bench.rows()) == 14
    assert not bench.errors_file.exists()


def test_too_long_rows_get_another_look_when_the_context_changed(bench: Bench) -> None:
    bench.write([{"id": "a", "prompt": "x" * 50}, {"id": "b", "prompt": "x"}])
    bench.generate("--max-model-len", "40", code=3)
    bench.generate("--max-model-len", "40", code=3)
    assert fake.FakeEngine.loads == 1
    bench.generate("--max-model-len", "100")
    assert len(bench.rows()) == 2


def test_rerun_truncated_keeps_rows_that_ended_by_themselves(bench: Bench) -> None:
    # curator#697: keep good rows, redo only those that were cut, with a larger limit
    bench.write(ROWS)
    bench.generate("--max-tokens", "15")
    cut = {row["id"] for row in bench.rows() if row["finish_reason"] == "length"}
    assert 0 < len(cut) < 12
    bench.generate("--max-tokens", "100", "--rerun", "truncated")
    assert set(made(bench)[12:]) == cut
    again = bench.output.read_bytes()
    assert b'"length"' not in again
    bench.generate("--max-tokens", "100", "--rerun", "truncated")
    assert bench.output.read_bytes() == again


def test_smaller_limit_redoes_rows_that_pass_it(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate("--max-tokens", "100")
    bench.generate("--max-tokens", "15")
    assert all(row["usage"]["completion_tokens"] <= 15 for row in bench.rows())
    kept = [row["sampling"]["max_tokens"] for row in bench.rows()]
    assert set(kept) == {15, 100}


def test_rerun_of_nothing_is_refused(bench: Bench) -> None:
    bench.write(ROWS)
    assert "--rerun" in bench.generate("--rerun", "failed", code=2).err
    bench.generate()
    assert "nothing left to do" in bench.generate("--rerun", "failed").err


def test_metadata_may_change_without_decoding_again(bench: Bench) -> None:
    bench.write([{**row, "level": 1} for row in ROWS])
    bench.generate("--passthrough")
    bench.write([{**row, "level": 2} for row in ROWS])
    bench.generate("--passthrough")
    assert fake.FakeEngine.loads == 1
    assert {row["input"]["level"] for row in bench.rows()} == {2}
    journal = bench.journal.read_bytes()
    bench.generate("--passthrough")
    assert bench.journal.read_bytes() == journal
    bench.write(ROWS)
    bench.generate()
    assert "input" not in bench.rows()[0]
    bench.generate("--passthrough")
    assert bench.rows()[0]["input"] == {}


def test_bad_row_that_was_fixed_leaves_the_errors_file(bench: Bench) -> None:
    bench.write([*ROWS, {"id": "x", "prompt": 1}])
    bench.generate(code=3)
    bench.write([*ROWS, {"id": "x", "prompt": "1"}])
    bench.generate()
    assert len(bench.rows()) == 13
    assert not bench.errors_file.exists()


def test_passthrough_turns_unknown_fields_into_data_on_resume(bench: Bench) -> None:
    bench.write([{"prompt": "a", "level": 1}])
    bench.generate(code=3)
    bench.generate("--passthrough")
    assert bench.rows()[0]["input"] == {"level": 1}


def test_another_models_name_is_told(bench: Bench) -> None:
    # was two digests, which say nothing
    bench.write(ROWS)
    bench.generate()
    other = bench.folder / "tuned"
    shutil.copytree(bench.folder / "m", other)
    (other / "model.safetensors").write_bytes(b"tuned" * 200)
    text = bench.generate("-m", str(other), code=2).err
    assert re.search(r"model: '\S+/m \(\w+\)' then, '\S+/tuned \(\w+\)' now", text)


def test_smaller_limit_says_how_many_finished_rows_it_leaves_out(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    text = bench.generate("--limit", "5").err
    assert len(bench.rows()) == 5
    assert "7 finished lines of earlier runs are left out of" in text
    assert "(--limit 5)" in text
    assert "left out" not in bench.generate("--limit", "12").err
    assert len(bench.rows()) == 12
    assert fake.FakeEngine.loads == 1


def test_outputs_with_and_without_jsonl_share_nothing(bench: Bench) -> None:
    bench.write([*ROWS, b"{"])
    bench.generate(code=3)
    files = {p: p.read_bytes() for p in (bench.output, bench.journal, bench.errors_file)}
    bare = bench.folder / "out"
    for _ in range(2):
        bench.generate("-o", str(bare), "--temperature", "1", code=3)
    assert {p: p.read_bytes() for p in files} == files
    assert len(bare.read_bytes().splitlines()) == 12
    assert (bench.folder / "out.out.journal").exists()
    assert (bench.folder / "out.out.errors.jsonl").exists()
    assert fake.FakeEngine.loads == 2


def test_output_named_by_an_earlier_version_is_gone_on_with(bench: Bench) -> None:
    bench.write(ROWS)
    bench.generate()
    bare = bench.folder / "out"
    bench.output.rename(bare)  # what `-o out` left: out and out.journal
    assert "nothing left to do" in bench.generate("-o", str(bare)).err
    assert fake.FakeEngine.loads == 1


def test_template_names_that_are_taken_are_a_usage_error(bench: Bench) -> None:
    bench.write(ROWS)
    result = bench.generate("--chat-template-kwargs", '{"tokenize": 1, "think": 2}', code=2)
    assert "--chat-template-kwargs may not name tokenize:" in result.err
