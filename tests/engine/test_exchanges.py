"""What `dspark bench collectives` counts; real ranks are timed in tests/e2e/test_ranks.py."""

from types import SimpleNamespace
from typing import Any

import torch

from engine.dist.collectives import Solo
from engine.exchanges import Shapes, _of_batch


class Pretended(Solo):
    """One of two ranks, alone."""

    size = 2


def test_bytes_to_experts_and_back() -> None:
    """3 requests of 5 tokens: 8 rows of 16 numbers a rank, each way."""
    group: Any = SimpleNamespace(ranks=Pretended())
    shapes = Shapes(16, 64, 4, "float32", "cpu", (3,), has_owners=True)
    found = {e.name: e for e in _of_batch(group, shapes, 3, torch.device("cpu"))}
    for name, shape in (
        ("own tokens, all-gather", "8 x 16"),
        ("experts' parts, all-to-all", "16 x 16"),
    ):
        assert (found[name].shape, found[name].num_bytes) == (shape, 8 * 16 * 4)
    assert found["hidden, all-reduce"].num_bytes == 15 * 16 * 4
