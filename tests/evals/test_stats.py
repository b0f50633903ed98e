"""Against the worked numbers of the plan and against enumeration."""

import itertools

import pytest

from engine.errors import ConfigError
from evals.gates import parse_gates
from evals.stats import mcnemar, pair, wilson


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(1035, 1319, 0.762, 0.806), (1187, 1319, 0.883, 0.915), (190, 200, 0.910, 0.973)],
)
def test_wilson(right: int, total: int, low: float, high: float) -> None:
    found = wilson(right, total)
    assert found is not None
    assert found == (pytest.approx(low, abs=6e-4), pytest.approx(high, abs=6e-4))


def test_wilson_at_the_ends() -> None:
    assert wilson(0, 0) is None
    for right in (0, 10):
        found = wilson(right, 10)
        assert found is not None
        assert 0 <= found[0] < found[1] <= 1


@pytest.mark.parametrize(
    ("b", "c", "p"), [(20, 20, 1.0), (25, 15, 0.154), (30, 15, 0.0357), (40, 20, 0.0135)]
)
def test_mcnemar(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == pytest.approx(p, rel=0.01)
    assert mcnemar(c, b) == mcnemar(b, c)


def test_mcnemar_by_enumeration() -> None:
    for total in range(8):
        for b in range(total + 1):
            far = abs(2 * b - total)
            splits = [sum(s) for s in itertools.product((0, 1), repeat=total)]
            share = sum(abs(2 * s - total) >= far for s in splits) / len(splits)
            assert mcnemar(b, total - b) == pytest.approx(share)


def test_pairs() -> None:
    found = pair(
        {"a": True, "b": True, "c": False, "d": False, "only here": True},
        {"a": True, "b": False, "c": True, "d": False},
    )
    assert (found.both, found.neither, found.only_drafted, found.only_plain) == (
        1,
        1,
        ("b",),
        ("c",),
    )
    assert (found.rows, found.flips, found.p_value) == (4, 2, 1.0)


def test_gates() -> None:
    names = {"acc": "", "al": ""}
    gates = parse_gates(["acc>=87%, al>3.5", "acc < 1"], names)
    values = {"acc": 0.9, "al": 3.5}
    assert [g.check(values)["passed"] for g in gates] == [True, False, True]
    assert not gates[0].check({"acc": None})["passed"]
    for bad in ("acc", "acc>=x", "acc>=1 al>2", "acc=1", ""):
        with pytest.raises(ConfigError, match="is not a bar"):
            parse_gates([bad], names)
    with pytest.raises(ConfigError, match="does not measure 'mcnemar'"):
        parse_gates(["mcnemar>0.05"], names)
