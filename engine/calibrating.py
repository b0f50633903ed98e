"""Collects what drafts promised and what came of them, and fits temperatures to it."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.engine import Engine
from engine.errors import ConfigError
from engine.request import Request
from engine.runner.pending import RoundResult
from engine.sequence import Sequence
from engine.spec.calibration import (
    Bin,
    Calibration,
    Scale,
    evaluate,
    logits_of,
    reliability,
    survivals,
)

HELD_OUT = 3
"""Every third request is judged on, not fitted to."""

_LEAST = 100
"""Rounds on either side, at least."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A fit, and how survivals and drafts that stayed went together on held-out rows."""

    calibration: Calibration
    before: list[Bin]
    after: list[Bin]


class _Collector:
    """Rounds by request: confidence logits and what was committed."""

    def __init__(self) -> None:
        self.logits: dict[str, list[NDArray[np.float64]]] = {}
        self.committed: dict[str, list[int]] = {}

    def __call__(
        self, members: Items[Sequence], result: RoundResult, valid: NDArray[np.bool_]
    ) -> None:
        if result.survival is None:
            return
        logits = logits_of(result.survival)
        for r, sequence in enumerate(members):
            if valid[r] and result.committed[r] > 0:
                name = sequence.request.request_id
                self.logits.setdefault(name, []).append(logits[r])
                self.committed.setdefault(name, []).append(int(result.committed[r]))

    def of(self, names: Items[str]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        logits = [row for name in names for row in self.logits.get(name, ())]
        committed = [n for name in names for n in self.committed.get(name, ())]
        return np.array(logits), np.array(committed, dtype=np.int64)


def calibrate(
    engine: Engine,
    requests: Items[Request],
    about: dict[str, Any],
    on_done: Callable[[int], None] = lambda _done: None,
) -> Calibrated:
    """Decode `requests` with every draft verified, and fit its confidence head.

    Args:
        engine: Loaded with a drafter that has a confidence head, and without a calibration.
        requests: Ids differ.
        about: For people, into the file.
        on_done: Called with the number of finished requests.

    Raises:
        ConfigError: There is no confidence head, or too little to fit.
    """
    if not engine.decisions.has_confidence:
        raise ConfigError(
            "the drafter has no confidence head: there is nothing to calibrate",
            "use a drafter with enable_confidence_head",
        )
    collector = _Collector()
    engine.decisions.on_result = collector
    try:
        for done, _ in enumerate(engine.run(requests, verify="all"), start=1):
            on_done(done)
    finally:
        engine.decisions.on_result = None
    names = [r.request_id for r in requests]
    fitted = collector.of([n for i, n in enumerate(names) if i % HELD_OUT != HELD_OUT - 1])
    held_out = collector.of(names[HELD_OUT - 1 :: HELD_OUT])
    if min(len(fitted[0]), len(held_out[0])) < _LEAST:
        raise ConfigError(
            f"{len(fitted[0])} rounds to fit and {len(held_out[0])} to judge on are too few, "
            f"{_LEAST} of each are needed",
            "give more prompts, or a larger --max-tokens if outputs were cut",
        )
    versions = {"torch": torch.__version__}
    made = evaluate(engine.decisions.pair_fingerprint, fitted, held_out, {**about, **versions})
    stayed = held_out[1][:, None] > np.arange(1, engine.gamma + 1)
    raw = survivals(held_out[0], Scale.identity(engine.gamma))
    scaled = survivals(held_out[0], made.scale)
    return Calibrated(
        made,
        reliability(raw.ravel(), stayed.ravel()),
        reliability(scaled.ravel(), stayed.ravel()),
    )
