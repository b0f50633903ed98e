"""Wrong options of `dspark generate`: named with value, bounds and fix, before anything loads."""

import pytest

from dspark_cli.settings import GenerateOptions
from tests.cli import fake
from tests.cli.conftest import Bench

HUGE = "99999999999999999999999999"


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--max-tokens", "0", "got 0"),
        ("--top-p", "7", "in (0, 1], got 7.0"),
        ("--top-p", "0", "in (0, 1], got 0.0"),
        ("--temperature", "nan", "got nan"),
        ("--temperature", "-1", "got -1.0"),
        ("--temperature", "warm", "'warm' is not a number"),
        ("--top-k", "-2", "got -2"),
        ("--min-p", "1.5", "in [0, 1], got 1.5"),
        ("--seed", HUGE, f"got {HUGE}"),
        ("--stop-token-id", "-3", "-3"),
        ("--n", "0", "0 is out of range; give 1 to 1024"),
        ("--n", "two", "'two' is not an integer"),
        ("--limit", "0", "0 is out of range; give 1 to"),
        ("--max-num-seqs", HUGE, f"{HUGE} is out of range; give 1 to"),
        ("--max-model-len", "0", "0 is out of range"),
        ("--gpu-memory-utilization", "2", "2.0 is out of range; give 0 to 1"),
        ("--grace", "inf", "inf is out of range"),
        ("--max-tokens", HUGE, f"got {HUGE}"),
        ("--top-k", HUGE, f"got {HUGE}"),
        ("--temperature", "1e308", "got 1e+308"),
    ],
)
def test_value_out_of_range_is_named_with_its_bounds(
    bench: Bench, flag: str, value: str, told: str
) -> None:
    bench.write([{"prompt": "a"}])
    text = bench.generate(f"{flag}={value}", code=2).err
    assert flag in text
    assert told in " ".join(text.split())
    assert fake.FakeEngine.loads == 0


def test_top_k_of_minus_1_keeps_all_in_options_as_in_rows(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, {"prompt": "b", "top_k": -1}])
    bench.generate("--top-k", "-1")
    assert [row["sampling"]["top_k"] for row in bench.rows()] == [0, 0]


def test_unset_variable_as_a_name_is_a_usage_error(bench: Bench) -> None:
    # -o "$OUT" with OUT unset wrote to stdout
    bench.write([{"prompt": "a"}])
    model = str(bench.folder / "m")
    for argv, name in (
        ([str(bench.input), "-o", "", "-m", model], "--output"),
        (["", "-o", str(bench.output), "-m", model], "INPUT"),
        ([str(bench.input), "-o", str(bench.output), "-m", ""], "--model"),
        ([str(bench.input), "-o", str(bench.output), "-m", model, "-d", " "], "--draft"),
    ):
        result = bench.call("generate", *argv)
        assert (result.code, result.out) == (2, b"")
        assert f"{name} is empty" in result.err


def test_help_names_both_demo_drafters() -> None:
    for name in ("model", "draft"):
        assert "demo-rnn" in GenerateOptions.__annotations__[name].__metadata__[0].help
