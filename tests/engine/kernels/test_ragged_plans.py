"""Random ragged verify plans: every index and layout op of a round against loops, exactly.

A quick share by default; DSPARK_PLANS=30000 runs as many (a minute or two), and on a GPU so do the
kernels. Wrong indices of a ragged plan are read out of bounds later, in another kernel.
"""

import os
import random
from dataclasses import dataclass

import pytest
import torch

from engine.kernels.acceptance import Acceptance
from engine.kernels.commit import commit, commit_triton
from engine.kernels.contract import PAD_SLOT
from engine.kernels.layout import Layout
from engine.kernels.slot_mapping import slot_mapping, slot_mapping_triton
from engine.kernels.step_inputs import step_inputs, step_inputs_triton
from engine.kernels.verify_plan import verify_lens, verify_lens_triton
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

PLANS = int(os.environ.get("DSPARK_PLANS", "600"))
S = 4
"""Tokens per KV block."""


@dataclass
class Scene:
    """One batch before its verification; rows past `live` are padding."""

    survival: list[list[float]]
    live: list[bool]
    anchors: list[int]
    starts: list[int]
    drafts: list[list[int]]
    table: list[list[int]]
    committed: list[int]
    budget: int
    tokens: int

    @classmethod
    def draw(cls, rng: random.Random) -> "Scene":
        num, gamma = rng.randint(1, 12), rng.randint(1, 8)
        live = [True] * num
        for r in range(rng.choice([num, num, rng.randint(1, num)]), num):
            live[r] = False
        survival = []
        for _ in range(num):
            row, s = [], 1.0
            for _ in range(gamma):
                s *= rng.choice([1.0, 0.5, 0.9, 0.0, rng.random()])
                row.append(s)
            survival.append(row)
        budget = rng.choice([0, 1, num * gamma, rng.randint(0, num * gamma)])
        most = sum(live) * (gamma + 1)
        asked = sum(live) + budget
        tokens = rng.choice([min(asked, most), asked, num * (gamma + 1) + 5])
        return cls(
            torch.tensor(survival).tolist(),
            live,
            [rng.randrange(1000) for _ in range(num)],
            [rng.randrange(50) for _ in range(num)],
            [[rng.randrange(1000) for _ in range(gamma)] for _ in range(num)],
            [rng.sample(range(1, 4000), 16) for _ in range(num)],
            [rng.randint(0, gamma + 1) for _ in range(num)],
            budget,
            tokens,
        )


def oracle(scene: Scene) -> dict[str, list[int]]:
    """All of it, token by token."""
    num, gamma = len(scene.live), len(scene.drafts[0])
    cells = [
        (-scene.survival[r][k], k, r) for r in range(num) if scene.live[r] for k in range(gamma)
    ]
    lens = [int(alive) for alive in scene.live]
    for _, _, r in sorted(cells)[: scene.budget]:
        lens[r] += 1
    ids, positions, slots, kept, cu = [], [], [], [], [0]
    for r in range(num):
        count = min(scene.committed[r], lens[r])
        for j in range(lens[r]):
            position = scene.starts[r] + j
            slot = scene.table[r][position // S] * S + position % S
            ids.append(scene.drafts[r][j - 1] if j else scene.anchors[r])
            positions.append(position)
            slots.append(slot)
            kept.append(slot if j < count else PAD_SLOT)
        cu.append(len(ids))
    padding = scene.tokens - len(ids)
    assert padding >= 0
    counts = [min(scene.committed[r], lens[r]) for r in range(num)]
    return {
        "lens": lens,
        "seq_lens": [n and scene.starts[r] + n for r, n in enumerate(lens)],
        "cu": cu,
        "ids": ids + [0] * padding,
        "positions": positions + [0] * padding,
        "slots": slots + [PAD_SLOT] * padding,
        "kept": kept + [PAD_SLOT] * padding,
        "computed": [scene.starts[r] + counts[r] for r in range(num)],
    }


def run(scene: Scene, device: str, *, kernels: bool) -> dict[str, list[int]]:
    """The same through the ops."""

    def put(x: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(x, dtype=dtype, device=device)

    num = len(scene.live)
    starts, live = put(scene.starts), put(scene.live, torch.bool)
    choose = verify_lens_triton if kernels else verify_lens
    plan = choose(put(scene.survival, torch.float32), starts, live, put([scene.budget]))
    lay = step_inputs_triton if kernels else step_inputs
    inputs = lay(put(scene.anchors), put(scene.drafts), starts, plan.lens, scene.tokens)
    where = slot_mapping_triton if kernels else slot_mapping
    slots = where(put(scene.table, torch.int32), inputs.positions, inputs.cu_seqlens_q, S)
    counts = torch.minimum(put(scene.committed), plan.lens.long())
    width = len(scene.drafts[0]) + 1
    ids = torch.where(torch.arange(width, device=device) < counts[:, None], 7, -1)
    finite = torch.ones(num, dtype=torch.bool, device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    at = Layout(put(scene.anchors), starts, live.int(), plan.seq_lens, none, none, none)
    anchor, computed = put([0] * (num + 1)), put([0] * (num + 1))
    finish = commit_triton if kernels else commit
    done = finish(
        Acceptance(ids, counts, finite),
        inputs.cu_seqlens_q,
        slots,
        torch.arange(num, device=device),
        at,
        anchor,
        computed,
        None,
    )
    assert done.result[:, 1].tolist() == plan.lens.tolist()
    return {
        "lens": plan.lens.tolist(),
        "seq_lens": plan.seq_lens.tolist(),
        "cu": inputs.cu_seqlens_q.tolist(),
        "ids": inputs.token_ids.tolist(),
        "positions": inputs.positions.tolist(),
        "slots": slots.tolist(),
        "kept": done.slots.tolist(),
        "computed": computed[:num].tolist(),
    }


def test_random_plans() -> None:
    rng = random.Random(0)
    for _ in range(PLANS):
        scene = Scene.draw(rng)
        assert run(scene, "cpu", kernels=False) == oracle(scene), scene


@needs_triton
@pytest.mark.usefixtures("poison")
def test_random_plans_in_kernels() -> None:
    rng = random.Random(1)
    for _ in range(min(PLANS, 40) if INTERPRETED else PLANS):
        scene = Scene.draw(rng)
        assert run(scene, KERNEL_DEVICE, kernels=True) == oracle(scene), scene
