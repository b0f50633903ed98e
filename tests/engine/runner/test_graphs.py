"""Which captured round serves a batch; capturing itself is tested on a GPU (test_cuda.py)."""

from types import SimpleNamespace
from typing import Any

import torch

from engine.runner.graphs import Graphs, Kind, graph_tiers


def test_tiers_cover_every_batch_with_little_padding() -> None:
    for most in (1, 2, 7, 31, 256, 300):
        tiers = graph_tiers(most)
        assert tiers == sorted(set(tiers))
        assert tiers[-1] == most
        for n in range(1, most + 1):
            tier = min(t for t in tiers if t >= n)
            assert tier - n <= max(n / 8, 0)


def test_a_shrinking_batch_reuses_what_is_captured() -> None:
    """Every tier was captured once on the way down: a second of stalls for a few rounds each."""
    steps: Any = SimpleNamespace(rows=SimpleNamespace(spare=64, device=torch.device("cpu")))
    graphs = Graphs(steps, 64)
    captured: Any = object()
    used = []
    for n in range(64, 0, -1):
        kind = graphs.kind(n, True, False, False)
        used.append(kind.tier)
        assert n <= kind.tier <= 2 * n
        graphs._captured.setdefault(kind, captured)
    assert len(set(used)) <= 7
    plain = graphs.kind(40, False, False, False)
    assert plain == Kind(40, False, False, False), "another kind has its own graphs"
