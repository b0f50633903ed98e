"""Verdicts on rows whose drafted and plain outputs differ."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.request import Completion
from evals.lossless import TIE_BELOW, Kind, compare
from tests.evals.conftest import Make


def compared(
    make: Make, a: tuple[int, ...], b: tuple[int, ...], logits: list[tuple[int, float]]
) -> tuple[Kind, int | None, list[Sequence[int]]]:
    asked: list[Sequence[int]] = []

    def top_logits(prefix: Sequence[int], count: int) -> list[tuple[int, float]]:
        asked.append(prefix)
        return logits[:count]

    def done(ids: tuple[int, ...]) -> Completion:
        return replace(make("r", []), token_ids=ids)

    row = compare(done(a), done(b), top_logits, TIE_BELOW["float32"])
    return row.kind, row.position, asked


def test_equal_rows_ask_nothing(make: Make) -> None:
    assert compared(make, (5, 6), (5, 6), []) == (Kind.equal, None, [])


def test_a_near_tie(make: Make) -> None:
    found = compared(make, (5, 6, 9), (5, 7, 8), [(7, 20.0), (6, 19.9995), (1, 3.0)])
    assert found == (Kind.tie, 1, [(1, 2, 5)])


@pytest.mark.parametrize(
    "logits",
    [
        [(7, 20.0), (6, 19.9)],  # clearly apart
        [(7, 20.0), (1, 19.9999)],  # the drafted token is nowhere near
        [(1, 20.0), (7, 19.9999), (6, 19.99)],  # only one of the two is near
    ],
)
def test_a_bug(make: Make, logits: list[tuple[int, float]]) -> None:
    assert compared(make, (5, 6, 9), (5, 7, 8), logits)[0] is Kind.bug


def test_three_near_ties(make: Make) -> None:
    logits = [(1, 20.0), (7, 19.9999), (6, 19.9996)]
    assert compared(make, (6,), (7,), logits)[0] is Kind.tie


def test_an_output_that_ends_early_is_a_bug(make: Make) -> None:
    """EOS is a token like others: a tie with it shows as a different token."""
    kind, at, _ = compared(make, (5, 6), (5, 6, 7), [(7, 20.0), (6, 19.9999)])
    assert (kind, at) == (Kind.bug, 2)
