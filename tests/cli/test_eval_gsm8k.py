"""`dspark eval`, with a fake engine behind it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dspark_cli import backend
from engine.request import Completion, FinishReason, Request, RequestFailure, Round
from tests.cli import fake
from tests.cli.conftest import Bench, Result, read_lines

WRONG_PLAIN = 2  # this row's plain answer is another one
CUT = 3


class EvalEngine(fake.FakeEngine):
    """Answers `Q<n>` with n; counts what it decodes."""

    decoded: ClassVar[list[str]] = []
    fail_after = 0

    def run(  # type: ignore[override]
        self,
        requests: Iterable[Request | None],
        *,
        speculate: bool = True,
        max_num_seqs: int | None = None,
    ) -> Iterator[Completion | RequestFailure]:
        for done, result in enumerate(super().run(requests), 1):
            if self.fail_after and done > self.fail_after:
                raise RuntimeError("the engine broke")
            if isinstance(result, Completion):
                result = answered(result, speculate)
            EvalEngine.decoded.append(result.request.request_id)
            yield result

    def top_logits(self, token_ids: Iterable[int], count: int = 2) -> list[tuple[int, float]]:
        return [(ord("9"), 20.0), (ord("2"), 19.9999), (0, 1.0)][:count]


def answered(result: Completion, speculate: bool) -> Completion:
    prompt = bytes(t for t in result.request.prompt_token_ids if t < 256).decode()
    found = re.findall(r"Q(\d+)", prompt)
    if not found:
        return result
    number = int(found[-1])
    says = 9 if number == WRONG_PLAIN and not speculate else number
    text = f"I think\n#### {says}" if number != CUT else "I think and think"
    return replace(
        result,
        text=text,
        token_ids=tuple(text.encode()),
        rounds=(Round(7, 2, 3), Round(7, 0, 1)) if speculate else (),
        finish_reason=FinishReason.LENGTH if number == CUT else FinishReason.STOP,
    )


@pytest.fixture
def evaluate(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "load_engine", EvalEngine)
    monkeypatch.setattr(EvalEngine, "decoded", [])
    rows = [{"question": f"Q{k}?", "answer": f"so\n#### {k}"} for k in range(6)]
    bench.write(rows)

    def call(*args: str, code: int = 0, command: str = "gsm8k") -> Result:
        given = ["--data", str(bench.input)] if command == "gsm8k" else [str(bench.input)]
        models = ["-m", str(bench.folder / "m"), "-d", str(bench.folder / "d")]
        if "--rescore" in args:
            models = []
        out = ["-o", str(bench.folder / "out")]
        result = bench.call("eval", command, *given, *models, *out, *args)
        assert result.code == code, result.err
        return result

    return call


def summary(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bench.folder / "out" / "summary.json").read_text("utf-8"))
    return found


def test_scores_and_files(bench: Bench, evaluate: Any) -> None:
    result = evaluate("--preset", "question")
    found = summary(bench)
    assert (found["schema"], found["preset"]) == ("dspark/eval-gsm8k", "question")
    assert (found["rows"], found["correct"], found["truncated"]) == (6, 5, 1)
    assert found["extractors"]["signed_decimal"]["correct"] == 5
    assert found["extractors"]["boxed"]["correct"] == 0
    assert found["acceptance"]["rounds"] > 0
    assert found["data"]["known_as"] is None
    assert "user:Q0?" in found["example_prompt"]["text"]
    assert "not the GSM8K test set (6 rows, not 1319" in result.err
    assert result.out == b""
    rows = read_lines((bench.folder / "out" / "per_request.jsonl").read_bytes())
    assert [row["outcome"] for row in rows] == ["correct"] * 3 + ["truncated"] + ["correct"] * 2
    assert (bench.folder / "out" / "report.html").stat().st_size > 5000


def test_presets_keep_their_name_only_unchanged(bench: Bench, evaluate: Any) -> None:
    evaluate("--preset", "sglang", "--max-tokens", "512", "--quiet")
    assert summary(bench)["preset"] == "sglang"
    assert summary(bench)["without_leaked_rows"]["rows_left_out"] == 5
    result = evaluate("--preset", "sglang", "--max-tokens", "100", "--overwrite")
    assert "note: the first 5 rows under test are shown in every prompt, answers" in result.err
    assert summary(bench)["preset"] == "sglang+custom"
    evaluate("--preset", "sglang", "--temperature", "0.5", "--overwrite")
    assert summary(bench)["preset"] == "sglang+custom"


def test_compare_plain_and_gates(bench: Bench, evaluate: Any) -> None:
    gate = ["--gate", "acc>=0.8,mcnemar>0.05", "--gate", "flips<=1"]
    result = evaluate("--preset", "question", "--compare-plain", *gate)
    paired = summary(bench)["paired"]
    assert (paired["only_drafted_correct"], paired["only_plain_correct"]) == (1, 0)
    assert paired["flipped_ids"]["only_drafted_correct"] == [str(WRONG_PLAIN)]
    assert paired["equal_outputs"] == 5
    assert paired["mcnemar_p"] == 1.0
    assert summary(bench)["plain"]["correct"] == 4
    assert "ids 2" in result.err
    failing = evaluate("--preset", "question", "--compare-plain", "--gate", "acc>90%", code=4)
    assert "gate acc>90%: FAILED" in failing.err
    assert summary(bench)["gates"] == [{"gate": "acc>90%", "value": 0.833333, "passed": False}]


def test_a_broken_run_goes_on(bench: Bench, evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long evaluation must not lose finished rows."""
    monkeypatch.setattr(EvalEngine, "fail_after", 4)
    evaluate("--preset", "question", code=1)
    assert not (bench.folder / "out" / "summary.json").exists()
    first, EvalEngine.decoded = EvalEngine.decoded, []
    monkeypatch.setattr(EvalEngine, "fail_after", 0)
    result = evaluate("--preset", "question")
    assert len(first) == 4
    assert sorted(first + EvalEngine.decoded) == [str(k) for k in range(6)]
    assert "4 of 6 rows are in" in result.err
    assert summary(bench)["resumed_requests"] == 4
    assert summary(bench)["correct"] == 5
    # other settings: refused, unless told to start over; another limit of rows goes on
    refused = evaluate("--preset", "question", "--max-tokens", "9", code=2)
    assert "holds another evaluation" in refused.err
    EvalEngine.decoded = []
    evaluate("--preset", "question", "--limit", "2")
    assert EvalEngine.decoded == []
    assert summary(bench)["rows"] == 2
    evaluate("--preset", "question", "--overwrite")
    assert len(EvalEngine.decoded) == 6


def test_another_drafter_is_measured_anew(bench: Bench, evaluate: Any) -> None:
    evaluate("--preset", "question")
    (bench.folder / "d" / "model.safetensors").write_bytes(b"another")
    EvalEngine.decoded = []
    evaluate("--preset", "question")
    assert len(EvalEngine.decoded) == 6


def test_failed_rows_are_errors(bench: Bench, evaluate: Any) -> None:
    rows = [
        {"question": "Q1?", "answer": "#### 1"},
        {"question": "FAIL_engine", "answer": "#### 2"},
    ]
    bench.write([*rows, {"question": "x" * 300, "answer": "#### 3"}])
    evaluate("--preset", "question", code=3)
    found = summary(bench)
    assert (found["rows"], found["answered"], found["error"], found["wrong"]) == (3, 1, 2, 0)
    assert found["accuracy"] == 1.0
    lines = read_lines((bench.folder / "out" / "per_request.jsonl").read_bytes())
    assert [line["error"] and line["error"].split(":")[0] for line in lines] == [
        None,
        "engine",
        "too_long",
    ]


def test_rescore(bench: Bench, evaluate: Any) -> None:
    texts = bench.folder / "texts.jsonl"
    lines = [
        {"index": 1, "text": "#### 1"},
        {"index": 0, "text": "#### 5"},
        {"index": 99, "text": ""},
    ]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = evaluate(
        "--rescore", str(texts), "--gate", "acc>=0.5", "--preset", "lm-eval-cot-zeroshot"
    )
    found = summary(bench)
    assert (found["arm"], found["rows"], found["correct"]) == ("rescored", 2, 1)
    assert found["acceptance"] is None
    assert "4 of 6 rows have no text" in " ".join(found["notes"])
    assert "accuracy 50.00 %" in result.err
    assert fake.FakeEngine.loads == 0
    evaluate("--rescore", str(texts), code=2)  # the reports are there already
    evaluate("--rescore", str(texts), "--gate", "al>=3", code=2)


def test_a_report_of_two_arms_is_rescored_by_its_first(bench: Bench, evaluate: Any) -> None:
    """Its second arm's rows were said to come twice."""
    texts = bench.folder / "per_request.jsonl"
    lines = [
        {"index": index, "arm": arm, "text": text}
        for arm, text in (("drafted", "#### 1"), ("plain", "#### 5"))
        for index in range(6)
    ]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate("--rescore", str(texts), "--preset", "lm-eval-cot-zeroshot")
    both = summary(bench)["correct"]
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines[:6]))
    evaluate("--rescore", str(texts), "--preset", "lm-eval-cot-zeroshot", "--overwrite")
    assert summary(bench)["correct"] == both


def test_rescore_imports_no_torch(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"index": 0, "text": "#### 3"}\n')
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "q", "answer": "#### 3"}\n')
    code = (
        "import sys; from dspark_cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    given = ["--rescore", str(rows), "--data", str(data), "--out", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", code, "eval", "gsm8k", *given], check=True)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["correct"] == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": "x"}', "no index"),
        ('{"index": 0}', "no text"),
        ('{"index": 0, "text": "a"}\n{"index": 0, "text": "b"}', "comes twice"),
        ('{"index": 77, "text": "a"}', "has no text for any row"),
        ("nonsense", "line 1: not JSON"),
    ],
)
def test_rescore_refuses(bench: Bench, evaluate: Any, line: str, why: str) -> None:
    texts = bench.folder / "texts.jsonl"
    texts.write_text(line + "\n")
    assert why in evaluate("--rescore", str(texts), code=2).err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--preset", "nope"], "no preset 'nope'"),
        (["--gate", "mcnemar>0.05"], "does not measure 'mcnemar'"),
        (["--preset", "boxed", "--shots", "3"], "has no shots"),
    ],
)
def test_refused_before_anything_is_loaded(evaluate: Any, args: list[str], why: str) -> None:
    assert why in evaluate(*args, code=2).err
    assert fake.FakeEngine.loads == 0


def test_no_model(bench: Bench) -> None:
    result = bench.call("eval", "gsm8k", "--data", str(bench.input))
    assert (result.code, "no --model" in result.err) == (2, True)


def test_lossless_verdicts(bench: Bench, evaluate: Any) -> None:
    """Row 2 says 2 drafted and 9 plain: near in the fake's logits under a wide bound only."""
    result = evaluate("--tie-below", "0.001", command="lossless")
    assert summary(bench)["rows"] == {"equal": 5, "tie": 1, "bug": 0, "error": 0}
    assert "lossless up to near ties: 1 of 6 rows" in result.err
    result = evaluate("--tie-below", "0.00001", command="lossless", code=4)
    assert "NOT lossless: 1 of 6 rows" in result.err
    (row,) = summary(bench)["differing"]
    assert (row["row_id"], row["drafted_token_text"], row["plain_token_text"]) == ("2", "2", "9")
    assert row["gap"] == pytest.approx(0.0001, rel=0.01)


def test_lossless_needs_a_drafter(bench: Bench) -> None:
    bench.write([{"prompt": "Q1"}])
    result = bench.call("eval", "lossless", str(bench.input), "-m", str(bench.folder / "m"))
    assert (result.code, "no drafter" in result.err) == (2, True)


def test_lossless_rows_without_output(bench: Bench, evaluate: Any) -> None:
    bench.write(
        [{"prompt": "Q1"}, {"prompt": ""}, {"messages": [{"role": "user", "content": "Q4"}]}]
    )
    evaluate(command="lossless", code=3)
    assert summary(bench)["rows"] == {"equal": 2, "tie": 0, "bug": 0, "error": 1}
