"""Wrong options: named with value, bounds and fix, before anything loads."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any, get_args, get_type_hints

import pytest

from dspark_cli.engine_options import EngineOptions
from dspark_cli.generate import generate
from dspark_cli.main import COMMANDS, command, run
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
        ("--max-model-len", "1", "must be >= 2, got 1"),  # no prompt fits, each row would fail
        ("--gpu-memory-utilization", "2", "2.0 is out of range; give more than 0, up to 1"),
        ("--grace", "inf", "inf is out of range"),
        ("--max-tokens", HUGE, f"got {HUGE}"),
        ("--top-k", HUGE, f"got {HUGE}"),
        ("--temperature", "1e308", "got 1e+308"),
        # as Typer has it, behind the name of a Python exception
        ("--verify", "most", "'--verify': 'most' is not one of 'all', 'lagged', 'sync'"),
        ("--rerun", "all", "'--rerun': 'all' is not one of 'failed', 'truncated'"),
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
        assert "demo-rnn" in generate.__annotations__[name].__metadata__[0].help


def functions(
    table: Any = None, before: tuple[str, ...] = ()
) -> Iterator[tuple[str, Callable[..., None]]]:
    """Every command: its words and its function."""
    for name, (where, _) in (table or COMMANDS).items():
        module, _, attribute = where.partition(":")
        found = getattr(import_module(module), attribute)
        if isinstance(found, dict):
            yield from functions(found, (*before, name))
        else:
            yield " ".join((*before, name)), found


def commands() -> Iterator[tuple[str, Any]]:
    """The same as the command line has them."""
    for words, function in functions():
        yield words, command(function, words.rpartition(" ")[2])


def is_option(param: Any) -> bool:
    return bool(param.param_type_name == "option")


def test_every_option_of_every_command_is_documented() -> None:
    seen = dict(commands())
    assert {"generate", "eval gsm8k", "bench round", "data speed-bench check"} <= seen.keys()
    for words, made in seen.items():
        for param in made.params:
            assert param.help, (words, param.name)


def test_no_number_is_left_to_the_library_to_check() -> None:
    # its texts say "0 is not in the range x>=1", and nothing of the fix
    checked = 0
    for words, function in functions():
        for name, hint in get_type_hints(function, include_extras=True).items():
            kinds = {hint, *get_args(hint), *(k for a in get_args(hint) for k in get_args(a))}
            if kinds & {int, float}:
                assert hint.__metadata__[0].parser is not None, (words, name)
                checked += 1
    assert checked > 60


def test_an_engine_option_is_the_same_in_every_command() -> None:
    known: dict[str, tuple[str, Any]] = {}
    for words, made in commands():
        if words == "inspect":  # loads no engine: its sizes are of a plan
            continue
        for param in filter(is_option, made.params):
            if param.name in {field.name for field in fields(EngineOptions)}:
                first, same = known.setdefault(param.name, (words, param))
                assert (param.opts, param.help) == (same.opts, same.help), (words, first)
    assert known.keys() == {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(
    ("argv", "flag", "told"),
    [
        (["eval", "gsm8k"], "--shots=-1", "-1 is out of range; give 0 to"),
        (["eval", "gsm8k"], "--limit=0", "0 is out of range; give 1 to"),
        (["eval", "gsm8k"], "--gpu-memory-utilization=0", "0.0 is out of range; give more than 0"),
        (["eval", "gsm8k"], "--max-tokens=0", "got 0; give a value in these bounds"),
        (["eval", "gsm8k"], "--temperature=-1", "got -1.0; give a value in these bounds"),
        (["eval", "gsm8k"], "--seed=x", "'x' is not an integer; write it in digits"),
        (["eval", "lossless", "p.jsonl"], "--tie-below=-1", "give a finite number >= 0"),
        (["eval", "lossless", "p.jsonl"], "--limit=none", "'none' is not an integer"),
        (["eval", "speed-bench", "--data=x"], "--limit=0", "0 is out of range; give 1 to"),
        (["bench", "throughput"], "--pairs=0", "0 is out of range; give 1 to"),
        (["bench", "throughput"], "--num-prompts=0", "0 is out of range; give 1 to"),
        (["bench", "throughput"], "--input-len=0", "0 is out of range; give 1 to"),
        (["bench", "throughput"], "--max-num-seqs=1,0", "0 is out of range; give 1 to"),
        (["bench", "throughput"], "--max-num-seqs=1;2", "'1;2' is not a list of numbers; write 1,"),
        (["bench", "round"], "--requests=", "'' is not a list of numbers; write 1,2"),
        (["bench", "round"], "--rounds=0", "0 is out of range; give 1 to"),
        (["bench", "round"], "--prompt-tokens=no", "'no' is not an integer"),
        (["bench", "round"], "--synthetic-acceptance=0.5", "give a finite number >= 1"),
        (["bench", "round"], "--device=tpu", "'auto', 'cpu', 'cuda'"),
        (["inspect", "m"], "--max-num-seqs=0", "0 is out of range; give 1 to"),
    ],
)
def test_every_command_names_value_bounds_and_fix(
    argv: list[str], flag: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if argv[0] == "inspect" else ["-m", "m"]
    with pytest.raises(SystemExit) as info:
        run([*argv, *model, flag])
    assert info.value.code == 2
    text = " ".join(capsys.readouterr().err.split())
    assert flag.split("=")[0] in text
    assert told in text
