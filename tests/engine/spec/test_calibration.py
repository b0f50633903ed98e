"""Calibration: scales of known distortions are found, and survivals then mean what they say."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.spec.calibration import (
    Calibration,
    Scale,
    ece,
    evaluate,
    fit,
    logits_of,
    reliability,
    survivals,
)

G = 4
TRUE = np.array([0.4, 2.5, 1.0, 4.0])
SHIFT = np.array([0.8, 0.0, -1.0, 0.5])
NOTHING = Scale.identity(G)


def rounds(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are TRUE times too large and SHIFT off, and what honest ones committed."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(1.0, 1.5, (count, G))
    stays = rng.random((count, G)) < 1.0 / (1.0 + np.exp(-honest))
    return (honest - SHIFT) * TRUE, 1 + stays.cumprod(axis=1).sum(axis=1)


def test_known_distortions_are_found() -> None:
    got = fit(*rounds(40_000, 0))
    assert got.temperatures == pytest.approx(TRUE, rel=0.25)
    assert abs(np.log(got.temperatures / TRUE)).mean() < 0.12
    assert got.shifts == pytest.approx(SHIFT, abs=0.15)


def test_held_out_error_falls_to_a_third_or_below_one_and_a_half_percent() -> None:
    made = evaluate({}, rounds(20_000, 1), rounds(20_000, 2), {})
    assert made.overall_before > 0.05
    assert made.overall_after < max(made.overall_before / 3, 0.015)
    assert all(a < 0.03 for a in made.ece_after)
    assert max(made.ece_before) > 0.1


def test_calibrated_logits_are_left_alone() -> None:
    logits, committed = rounds(40_000, 3)
    same = fit(logits / TRUE + SHIFT, committed)
    assert same.temperatures == pytest.approx(np.ones(G), rel=0.2)
    assert same.shifts == pytest.approx(np.zeros(G), abs=0.15)
    for committed in (np.full(50, G + 1), np.ones(50, dtype=np.int64)):  # nothing to tell apart
        found = fit(np.zeros((50, G)), committed)
        assert (found.temperatures > 0).all()
        assert np.isfinite(found.shifts).all()
    with pytest.raises(ValueError, match="no rounds"):
        fit(np.zeros((0, G)), np.zeros(0, dtype=np.int64))


def test_error_by_hand() -> None:
    survival = np.array([0.9, 0.91, 0.1, 0.5])
    stayed = np.array([True, False, False, True])
    assert ece(survival, stayed) == pytest.approx((0.81 + 0.1 + 0.5) / 4)
    assert [(round(b.foreseen, 3), b.stayed, b.count) for b in reliability(survival, stayed)] == [
        (0.1, 0.0, 1),
        (0.5, 1.0, 1),
        (0.905, 0.5, 2),
    ]
    extreme = survivals(np.array([[1e9, -1e9]]), Scale.identity(2))
    assert extreme.tolist() == [[1.0, pytest.approx(0.0, abs=1e-300)]]


def test_logits_come_back_from_survivals() -> None:
    logits = np.random.default_rng(0).normal(0, 3, (200, G))
    back = logits_of(survivals(logits, NOTHING).astype(np.float32).astype(np.float64))
    assert np.abs(back - logits).max() < 0.02
    assert logits_of(np.array([[1.0, 0.0, 0.0]])).tolist()[0][0] > 25


def test_file(tmp_path: Path) -> None:
    pair = {"target": "t", "draft": "d"}
    made = evaluate(pair, rounds(500, 4), rounds(500, 5), {"prompts": "p"})
    file = tmp_path / "sts.json"
    file.write_text(json.dumps(made.to_json()))
    assert Calibration.read(file) == made
    made.check(pair, G)
    with pytest.raises(ConfigError, match="draft is x here, d there"):
        made.check({"target": "t", "draft": "x"}, G)
    with pytest.raises(ConfigError, match="4 temperatures for 3"):
        made.check(pair, 3)
    values = made.to_json()
    for change, message in (
        ({"temperatures": [1.0, 0.0]}, "> 0"),
        ({"temperatures": None}, "damaged"),
        ({"shifts": [0.0]}, "one for each"),
        ({"schema": "x"}, "schema"),
    ):
        file.write_text(json.dumps({**values, **change}))
        with pytest.raises(ConfigError, match=message):
            Calibration.read(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        Calibration.read(file)
