"""examples/sharded_loop.py: a row for each batch size, smallest first, whatever was asked first."""

import sys

import pytest

from examples import sharded_loop


def test_both_engines_are_measured_at_every_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "x --model demo --device cpu --requests 3,1 --rounds 2 --kv-cache-memory-bytes 30000000"
    monkeypatch.setattr(sys, "argv", given.split())
    sharded_loop.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["1", "3"]
    for row in rows:
        off, on = float(row[1]), float(row[2])
        assert min(on, off) > 0
        assert float(row[3].split()[0]) == pytest.approx(100 * (on / off - 1), abs=0.5)
        # tokens a round from a round's time and the tokens a second of its loop
        assert 1 <= float(row[4]) * off / 1e3 / int(row[0]) <= 8.5
