"""`dspark generate` end to end, over the fake engine: what goes in, what comes out."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import fake
from tests.cli.conftest import Bench, read_lines

PROMPTS = [{"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(25)]


def test_output_is_in_input_order_though_rows_end_out_of_order(bench: Bench) -> None:
    bench.write(PROMPTS)
    bench.generate()
    rows = bench.rows()
    assert [row["id"] for row in rows] == [row["id"] for row in PROMPTS]
    assert [row["index"] for row in rows] == list(range(25))
    journal = [json.loads(line) for line in bench.journal.read_bytes().splitlines()[1:]]
    assert [record["row"]["id"] for record in journal] != [row["id"] for row in PROMPTS]


def test_output_row_holds_what_the_design_says_and_nothing_else(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    bench.generate("--temperature", "0.5", "--seed", "3", "--max-tokens", "5")
    (row,) = bench.rows()
    assert list(row) == [
        "id",
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "usage",
        "sampling",
        "spec",
    ]
    assert row["id"] == "0"
    assert row["usage"] == {"prompt_tokens": 1, "completion_tokens": len(row["token_ids"])}
    assert row["sampling"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 3,
        "max_tokens": 5,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
    }
    assert list(row["spec"]) == ["rounds", "drafted", "accepted", "acceptance_length"]


def test_without_a_drafter_spec_is_null(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    result = bench.generate("--draft", "none")
    assert bench.rows()[0]["spec"] is None
    assert "plain decoding" in result.err


def test_no_failures_leave_no_errors_file_even_a_stale_one(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    bench.errors_file.write_text("stale\n")
    bench.generate()
    assert not bench.errors_file.exists()
    assert sorted(p.name for p in bench.folder.iterdir()) == [
        "d",
        "in.jsonl",
        "m",
        "out.journal",
        "out.jsonl",
    ]


def test_row_fields_come_before_options(bench: Bench) -> None:
    bench.write(
        [
            {"prompt": "a", "temperature": 1, "max_tokens": 3, "stop": "x", "seed": 9},
            {"prompt": "a", "max_completion_tokens": 4, "stop": ["x", "y"], "top_k": -1},
            {"prompt": "a", "temperature": None, "logprobs": None, "stream": False, "tools": []},
        ]
    )
    bench.generate("--max-tokens", "7", "--stop", "q", "--top-p", "0.5", "--temperature", "0.25")
    a, b, c = (row["sampling"] for row in bench.rows())
    assert (a["temperature"], a["max_tokens"], a["stop"], a["seed"]) == (1.0, 3, ["x"], 9)
    assert (b["max_tokens"], b["stop"], b["top_k"], b["top_p"]) == (4, ["x", "y"], 0, 0.5)
    assert (c["temperature"], c["max_tokens"], c["stop"]) == (0.25, 7, ["q"])


def test_samples_are_lines_of_their_own_and_differ(bench: Bench) -> None:
    # vllm#11898: n > 1 with a seed gave n equal samples
    bench.write([{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "n": 1}])
    bench.generate("--n", "3", "--temperature", "1")
    rows = bench.rows()
    assert [(row["id"], row.get("sample")) for row in rows] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", None),
    ]
    assert len({row["text"] for row in rows}) == 4


def test_more_samples_keep_those_there_are(bench: Bench) -> None:
    bench.write([{"id": "a", "prompt": "x"}])
    bench.generate("--temperature", "1")
    first = bench.rows()[0]["text"]
    bench.generate("--temperature", "1", "--n", "3")
    assert bench.rows()[0]["text"] == first
    assert len(bench.journal.read_bytes().splitlines()) == 4


def test_equal_prompts_with_other_ids_are_sampled_apart(bench: Bench) -> None:
    bench.write([{"id": at, "prompt": "same"} for at in range(5)])
    bench.generate("--temperature", "1")
    assert len({row["text"] for row in bench.rows()}) == 5


def test_stdin_to_stdout_streams_in_input_order(bench: Bench) -> None:
    data = b"\n".join(json.dumps(row).encode() for row in PROMPTS)  # no newline at the end
    result = bench.call("generate", "-", "-o", "-", "-m", str(bench.folder / "m"), stdin=data)
    assert result.code == 0
    assert [row["id"] for row in read_lines(result.out)] == [row["id"] for row in PROMPTS]
    assert not bench.journal.exists()


def test_stdout_has_a_line_for_a_failed_row(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}])
    result = bench.call("generate", str(bench.input), "-o", "-", "-m", str(bench.folder / "m"))
    assert result.code == 3
    rows = read_lines(result.out)
    assert [row["finish_reason"] for row in rows] == ["stop", "error", "stop"]
    assert rows[1]["error"]["class"] == "empty"
    assert rows[1]["line"] == 2


def test_empty_stdin_is_an_input_error(bench: Bench) -> None:
    result = bench.call(
        "generate", "-", "-o", str(bench.output), "-m", str(bench.folder / "m"), stdin=b"\n\n"
    )
    assert result.code == 2
    assert "no rows" in result.err


def test_gzip_folder_and_glob(bench: Bench) -> None:
    folder = bench.folder / "rows"
    folder.mkdir()
    lines = [json.dumps(row).encode() + b"\n" for row in PROMPTS]
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[10:])))
    (folder / "a.jsonl").write_bytes(b"".join(lines[:10]))
    (folder / ".hidden.jsonl").write_bytes(b"{}\n")
    (folder / "notes.txt").write_bytes(b"{}\n")
    bench.generate(source=str(folder))
    whole = bench.output.read_bytes()
    assert len(bench.rows()) == 25
    bench.generate("--overwrite", source=str(folder / "*.jsonl*"))
    assert bench.output.read_bytes() == whole


def test_errors_name_the_file_when_there_are_several(bench: Bench) -> None:
    for name in ("a", "b"):
        row = json.dumps({"prompt": "x", "id": name})
        (bench.folder / f"part-{name}.jsonl").write_text(row + "\n{\n")
    bench.generate(source=str(bench.folder / "part-*.jsonl"), code=3)
    assert [Path(error["file"]).name for error in bench.errors()] == [
        "part-a.jsonl",
        "part-b.jsonl",
    ]
    assert [(error["index"], error["line"]) for error in bench.errors()] == [(1, 2), (3, 2)]


def test_truncated_gzip_is_one_clear_error(bench: Bench) -> None:
    path = bench.folder / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 5000)[:-20])
    result = bench.generate(source=str(path), code=2)
    assert "cannot read" in result.err
    assert fake.FakeEngine.loads == 0


def test_parquet(bench: Bench) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = pa.Table.from_pylist(
        [
            {"id": 1, "messages": [{"role": "user", "content": "hi"}], "seed": None},
            {"id": 2, "messages": [{"role": "user", "content": "ho"}], "seed": 5},
        ]
    )
    path = bench.folder / "rows.parquet"
    parquet.write_table(table, path)
    bench.generate(source=str(path))
    assert [(row["id"], row["sampling"]["seed"]) for row in bench.rows()] == [(1, 0), (2, 5)]


def test_hub_dataset(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load(name: str, config: str | None, *, split: str) -> Any:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"prompt": "a", "level": 3}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    bench.generate("--passthrough", source="someone/rows@main:test[:1]")
    assert asked == [("someone/rows", "main", "test[:1]")]
    assert bench.rows()[0]["input"] == {"level": 3}


def test_line_separators_inside_strings_do_not_split_rows(bench: Bench) -> None:
    # jsonlines#53, gluonts#920 and others: splitlines() cuts at U+2028, U+2029, U+0085
    prompt = "BREAKS a\u2028b\u2029c\x85d"
    bench.input.write_bytes(json.dumps({"prompt": prompt}, ensure_ascii=False).encode() + b"\n")
    bench.generate()
    (row,) = bench.rows()
    assert row["text"].startswith("\u2028é\u2029🙂\x85")
    text = bench.output.read_text("utf-8")
    assert len(text.splitlines()) == 1
    assert "é" in text
    assert "🙂" in text


def test_bom_crlf_blank_lines_and_no_last_newline(bench: Bench) -> None:
    bench.input.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": \r"b"}\r\n{"prompt": "c"}'
    )
    bench.generate()
    assert [row["index"] for row in bench.rows()] == [0, 1, 2]


def test_lines_are_counted_with_blank_ones(bench: Bench) -> None:
    bench.input.write_bytes(b'\n\n{"prompt": "a"}\n\n{"prompt": }\n')
    bench.generate(code=3)
    assert [(error["index"], error["line"]) for error in bench.errors()] == [(1, 5)]


def test_passthrough_carries_other_fields(bench: Bench) -> None:
    row = {"prompt": "a", "question": "q", "metadata": {"k": [1]}, "seed": 1}
    bench.write([row, {"prompt": "b"}])
    bench.generate("--passthrough")
    assert [row["input"] for row in bench.rows()] == [{"question": "q", "metadata": {"k": [1]}}, {}]


def test_declared_metadata_needs_no_flag(bench: Bench) -> None:
    bench.write([{"prompt": "a", "metadata": {"k": 1}, "input": "x", "task_id": "t"}])
    bench.generate()
    assert bench.rows()[0]["id"] == "t"
    assert "input" not in bench.rows()[0]


def test_limit_takes_the_first_rows_bad_ones_too(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, b"{", {"prompt": "c"}])
    bench.generate("--limit", "2", code=3)
    assert len(bench.rows()) == 1
    assert len(bench.errors()) == 1


def test_chat_wraps_prompts_and_raw_does_not(bench: Bench) -> None:
    bench.write([{"prompt": "abc"}])
    bench.generate()
    assert bench.rows()[0]["usage"]["prompt_tokens"] == 3
    bench.generate("--chat", "--overwrite", "--chat-template-kwargs", '{"think": false}')
    expected = len("[think=False]user:abc\nassistant:")
    assert bench.rows()[0]["usage"]["prompt_tokens"] == expected


def test_row_template_kwargs_are_laid_over_the_option(bench: Bench) -> None:
    messages = [{"role": "user", "content": "abc"}]
    bench.write([{"messages": messages, "chat_template_kwargs": {"b": 2}}])
    template = bench.folder / "chat.jinja"
    template.write_text("TEMPLATE")
    bench.generate("--chat-template-kwargs", '{"a": 1}', "--chat-template", str(template))
    expected = len("TEMPLATE[a=1][b=2]user:abc\nassistant:")
    assert bench.rows()[0]["usage"]["prompt_tokens"] == expected


def test_compare_plain_and_show(bench: Bench) -> None:
    bench.write(PROMPTS)
    metrics = bench.folder / "metrics.json"
    result = bench.generate("--compare-plain", "--show", "2", "--metrics-json", str(metrics))
    assert "speed-up" in result.err
    assert "25 of 25 outputs are equal" in result.err
    assert "--- r0 (" in result.err
    assert "> prompt number 1" in result.err
    assert "--- r2" not in result.err
    assert json.loads(metrics.read_text())["compare_plain"]["equal_outputs"] == 25


def test_metrics_say_what_ran_and_how_drafting_went(bench: Bench) -> None:
    bench.write([*PROMPTS, b"{"])
    path = bench.folder / "metrics.json"
    progress = bench.folder / "progress.json"
    bench.generate(
        *["--metrics-json", str(path), "--progress-file", str(progress), "--max-tokens", "20"],
        code=3,
    )
    metrics = json.loads(path.read_text())
    rows, acceptance = metrics["rows"], metrics["acceptance"]
    assert rows["lines"] == 26
    assert rows["failed_by_class"] == {"parse": 1}
    assert sum(rows["by_finish_reason"].values()) == 25
    assert acceptance["acceptance_length"] == pytest.approx(
        acceptance["committed"] / acceptance["rounds"], abs=1e-4
    )
    assert acceptance["by_position"][0]["drafted"] == acceptance["rounds"]
    assert metrics["engine"]["output_tokens"] == sum(len(r["token_ids"]) for r in bench.rows())
    assert metrics["manifest"]["input"]["rows_read"] == 26
    state = json.loads(progress.read_text())
    assert (state["phase"], state["done"], state["failed"], state["total"]) == ("done", 25, 1, 26)


def test_metrics_have_the_settings_that_ran_where_none_were_given(bench: Bench) -> None:
    bench.write(PROMPTS)
    path = bench.folder / "metrics.json"
    bench.generate("--metrics-json", str(path))
    metrics = json.loads(path.read_text())
    settings = metrics["manifest"]["settings"]
    assert metrics["phase"] == "done"
    assert settings["max_num_seqs"] == 4
    assert settings["max_model_len"] == fake.CONTEXT
    assert settings["max_num_batched_tokens"] == 512
    assert settings["num_speculative_tokens"] == 7
    # the journal keeps what was asked for: other defaults do not make another run
    header = json.loads(bench.journal.read_bytes().splitlines()[0])["run"]
    assert header["max_num_seqs"] is None


def test_quiet_says_nothing(bench: Bench) -> None:
    bench.write(PROMPTS)
    assert bench.generate("-q").err == ""


def test_snake_case_options_are_accepted(bench: Bench) -> None:
    bench.write([{"prompt": "a"}])
    bench.generate("--max_tokens", "3", "--max_model_len=32k", "--no_prefix_caching")
    assert bench.rows()[0]["sampling"]["max_tokens"] == 3


def test_lost_rows_are_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # vllm#26081, #1655: more or fewer outputs than inputs
    whole = fake.FakeEngine.run

    def lossy(self: fake.FakeEngine, requests: Any) -> Any:
        results = list(whole(self, requests))
        yield from results[1:]

    monkeypatch.setattr(fake.FakeEngine, "run", lossy)
    bench.write(PROMPTS)
    result = bench.generate(code=1)
    assert "1 rows unfinished" in result.err


def test_engine_error_is_one_line_and_keeps_what_ended(bench: Bench) -> None:
    bench.write([*PROMPTS, {"id": "bad", "prompt": "RAISE"}])
    result = bench.generate("--max-num-seqs", "2", code=1)
    assert "error: RuntimeError: the engine broke" in result.err
    assert "Traceback" not in result.err
    assert len(bench.journal.read_bytes().splitlines()) > 20
    assert not bench.output.exists()


def test_no_rows_left_means_no_weights_loaded(bench: Bench) -> None:
    bench.write([{"prompt": ""}, b"{"])
    bench.generate(code=3)
    assert fake.FakeEngine.loads == 0
    assert bench.output.read_bytes() == b""
