"""DeepSeek-V4.1's entries: latents by token, their places, choices on two levels; in steps."""

import random

import pytest
import torch

from engine.kernels import select_entries
from engine.kernels.compress import pool_ref, pool_triton
from engine.kernels.pair_rope import yarn_frequencies
from engine.kernels.rolling import (
    CompressedState,
    ring_store_ref,
    ring_store_triton,
    token_places,
)
from engine.kernels.rope import rope_table
from engine.kernels.select_entries import Blocks, select_entries_ref, select_entries_triton
from engine.kernels.store_entries import store_entries_ref, store_entries_triton
from tests.engine.kernels.test_rolling_kernels import (
    CLOSE,
    DEVICE,
    PADDING,
    ROWS,
    SIZE,
    Steps,
    randn,
    rejecting,
)
from tests.helpers.triton import needs_triton

pytestmark = [pytest.mark.usefixtures("poison"), needs_triton]
STEPS = [30, 3, 0], [4, 5, 1], [5, 2, 22], [5, 5, 5], [1, 1, 3]


def empty(ratio: int, width: int, places: int) -> CompressedState:
    rows = torch.full((ROWS, places, 2, width if places else 0), float("nan"), device=DEVICE)
    entries = torch.full((24 * SIZE // ratio, width), float("nan"), device=DEVICE)
    return CompressedState(rows, entries, ratio)


def test_latents_and_their_places() -> None:
    """Pairs within a step and over two, rejected tokens, a chunk longer than the ring, padding."""
    ratio, width = 2, 16
    ours, want = empty(ratio, width, ratio + 5), empty(ratio, width, ratio + 5)
    norm = 1 + 0.2 * randn(width)
    rope = rope_table(yarn_frequencies(8, 10000.0), 80).to(DEVICE)
    steps, rng = Steps(), random.Random(1)
    for counts in STEPS:
        batch, positions = steps.step(counts)
        places = token_places(batch, len(positions))
        pairs = randn(sum(counts) + PADDING, 2, width)
        pairs[sum(counts) :] = float("nan")
        latents = pool_ref(pairs, want, norm, 1e-6, batch)
        got = pool_triton(pairs, ours, norm, 1e-6, batch, positions, places)
        torch.testing.assert_close(got, latents, **CLOSE)
        closing = ((positions + 1) % ratio == 0) & (places.row >= 0)
        assert torch.equal(latents.any(dim=1), closing)
        rows = [ours.rows[:-1], want.rows[:-1]]  # the last one takes what is not kept
        torch.testing.assert_close(*rows, atol=0, rtol=0, equal_nan=True)
        store_entries_ref(latents, want, rope, batch)
        store_entries_triton(latents, ours, rope, batch, positions, places)
        torch.testing.assert_close(ours.entries, want.entries, equal_nan=True, **CLOSE)
        if max(counts) <= 5:
            rejecting(steps, [rng.randint(min(n, 1), n) for n in counts], counts)
    assert not ours.entries.isnan().all(dim=1).all()


def test_rings_hold_numbers_of_tokens() -> None:
    """One int64 a place, as for n-grams."""
    steps = Steps()
    ours, want = (torch.full((ROWS, 7), -1, device=DEVICE) for _ in "ab")
    for counts in STEPS:
        batch, positions = steps.step(counts)
        x = torch.randint(1 << 40, (len(positions),)).to(DEVICE)
        places = token_places(batch, len(positions))
        ring_store_ref(want, x, positions, None, places)
        ring_store_triton(ours, x, positions, None, places)
        assert torch.equal(ours[:-1], want[:-1])
    assert not (want[:-1] == -1).all(dim=1).any()


def test_a_token_may_be_a_window_of_its_own() -> None:
    """Then every token of the step is stored, turned by its own position, and padding is not."""
    width, steps = 24, Steps()
    ours, want = empty(1, width, 0), empty(1, width, 0)
    rope = rope_table(yarn_frequencies(8, 10000.0), 80).to(DEVICE)
    for counts in STEPS:
        batch, positions = steps.step(counts)
        x = randn(len(positions), width)
        places = token_places(batch, len(positions))
        store_entries_ref(x, want, rope, batch)
        store_entries_triton(x, ours, rope, batch, positions, places)
        torch.testing.assert_close(ours.entries, want.entries, equal_nan=True, **CLOSE)
    written = int((~want.entries.isnan().all(dim=1)).sum())
    assert written == sum(map(sum, STEPS))


@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("pieces", [False, True])
def test_choices_on_two_levels(heads: int, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks found, the newest among them, then entries inside them; a request with few blocks."""
    ratio, width, top_k, size, count = 1, 16, 3, 4, 2
    if pieces:  # a few tokens at a time
        monkeypatch.setattr(select_entries, "_KEYS", 150)
    state = CompressedState(randn(1), randn(24 * SIZE // ratio, width), ratio)
    steps = Steps()
    for counts in ([34, 3, 0], [4, 3, 2], [5, 5, 17]):
        batch, positions = steps.step(counts)
        places = token_places(batch, len(positions))
        inside: torch.Tensor | None = None
        for blocks in (Blocks(size, count), None):
            q, weights = randn(len(positions), heads, width), randn(len(positions), heads)
            blocks = blocks or Blocks(size, count, inside)
            want = select_entries_ref(q, weights, state, batch, top_k, blocks)
            got = select_entries_triton(q, weights, state, batch, top_k, positions, places, blocks)
            mine, exact = (x.entries.sort(dim=1).values for x in (got, want))
            torch.testing.assert_close(mine, exact)
            if blocks.inside is None:
                assert got.blocks is not None
                assert want.blocks is not None
                mine, exact = (x.sort(dim=1).values for x in (got.blocks, want.blocks))
                torch.testing.assert_close(mine, exact)
                live = places.row >= 0
                newest = torch.where(live, positions // size, -1)
                assert (got.blocks == newest[:, None]).any(dim=1).all()
                inside = got.blocks
            else:
                assert inside is not None
                assert got.blocks is None
                among = (exact[:, :, None] // size == inside[:, None]).any(dim=2)
                assert (among | (exact < 0)).all()


def test_blocks_that_all_fit_are_not_looked_for() -> None:
    steps = Steps()
    batch, positions = steps.step([34, 3, 0])
    state = CompressedState(randn(1), randn(24 * SIZE, 16), 1)
    q, weights = randn(len(positions), 4, 16), randn(len(positions), 4)
    places = token_places(batch, len(positions))
    blocks = Blocks(4, 9)
    got = select_entries_triton(q, weights, state, batch, 3, positions, places, blocks)
    assert got.blocks is None
    assert select_entries_ref(q, weights, state, batch, 3, blocks).blocks is None
    one_level = select_entries_ref(q, weights, state, batch, 3)
    torch.testing.assert_close(got.entries.sort().values, one_level.entries.sort().values)
