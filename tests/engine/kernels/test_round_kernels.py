"""gather_layout and commit: kernels against their references, exactly; the references by hand."""

import pytest
import torch

from engine.kernels.acceptance import Acceptance
from engine.kernels.commit import Committed, commit, commit_ref, commit_triton
from engine.kernels.contract import PAD_SLOT
from engine.kernels.layout import Layout, gather_layout, gather_layout_ref, gather_layout_triton
from engine.runner.pending import RoundResult
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("poison")


def rows(num_rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """anchor, num_computed, block_table, floats, ints of N rows."""
    return tuple(
        x.to(KERNEL_DEVICE)
        for x in (
            torch.randint(0, 10**6, (num_rows,)),
            torch.randint(0, 10**5, (num_rows,)),
            torch.randint(0, 10**6, (num_rows, columns), dtype=torch.int32),
            torch.rand(3, num_rows),
            torch.randint(-(2**62), 2**62, (2, num_rows)),
        )
    )


@needs_triton
@pytest.mark.parametrize("columns", [1, 7, 1500])
@pytest.mark.parametrize("members", [[0], [4, 2, 5, 5], [5]])
@pytest.mark.parametrize("width", [1, 8])
def test_gather_layout(members: list[int], width: int, columns: int) -> None:
    state, index = rows(6, columns), torch.tensor(members, device=KERNEL_DEVICE)
    got = gather_layout_triton(index, *state, width)
    for a, b in zip(got, gather_layout_ref(index, *state, width), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_last_row_is_padding() -> None:
    state = rows(3, 2)
    at = gather_layout(torch.tensor([1, 2]), *(x.cpu() for x in state), 4)
    assert at.lens.tolist() == [4, 0]
    assert at.seq_lens.tolist() == [int(state[1][1]) + 4, 0]
    assert at.anchors.tolist() == state[0][1:].tolist()
    assert torch.equal(at.block_table, state[2][1:].cpu())
    with pytest.raises(ValueError, match="num_computed: expected"):
        gather_layout(torch.tensor([0]), state[0], state[1][:2], *state[2:], 4)


def scene(lens: list[int], width: int, padding: int) -> tuple[object, ...]:
    """Arguments of commit for members with `lens` verified tokens; some are not finite."""
    num, spare = len(lens), 40
    lens_t = torch.tensor(lens, dtype=torch.int32)
    cu = torch.nn.functional.pad(lens_t.cumsum(0, dtype=torch.int32), (1, 0))
    committed = torch.tensor([int(torch.randint(1, n + 1, ())) if n else 0 for n in lens])
    ids = torch.randint(0, 999, (num, width))
    ids[torch.arange(width) >= committed[:, None]] = -1
    finite = torch.rand(num) > 0.2
    index = torch.where(lens_t > 0, torch.randperm(spare)[:num], spare)
    slots = torch.randint(0, 10**6, (sum(lens) + padding,))
    slots[sum(lens) :] = PAD_SLOT
    at = Layout(
        *(torch.randint(0, 999, (num,)) for _ in range(2)),
        lens_t,
        *(torch.zeros(0, dtype=torch.int32) for _ in range(4)),
    )
    on = [x.to(KERNEL_DEVICE) for x in (ids, committed, finite, cu, slots, index)]
    accepted = Acceptance(*on[:3])
    return accepted, *on[3:], Layout(*(x.to(KERNEL_DEVICE) for x in at))


@needs_triton
@pytest.mark.parametrize(
    ("lens", "width"), [([1], 1), ([8] * 17, 8), ([3, 0, 1, 0, 5, 0], 5), ([0, 0], 3)]
)
@pytest.mark.parametrize("padding", [0, 3, 700])
def test_commit(lens: list[int], width: int, padding: int) -> None:
    args = scene(lens, width, padding)
    states = [torch.arange(82, device=KERNEL_DEVICE).view(2, 41) for _ in range(2)]
    states[0][:, 40] = states[1][:, 40] = 5  # whatever padding writes there, nobody reads it
    survival = torch.rand(len(lens), width - 1, device=KERNEL_DEVICE) if width > 1 else None
    got = commit_triton(*args, *states[0], survival)  # type: ignore[arg-type]
    want = commit_ref(*args, *states[1], survival)  # type: ignore[arg-type]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torch.equal(states[0][:, :40], states[1][:, :40])


def test_a_round_by_hand() -> None:
    accepted = Acceptance(
        torch.tensor([[7, 8, -1], [9, -1, -1], [1, 2, 3], [-1, -1, -1]]),
        torch.tensor([2, 1, 3, 0]),
        torch.tensor([True, True, False, True]),
    )
    at = Layout(
        torch.tensor([70, 90, 10, 0]),
        torch.tensor([5, 6, 7, 0]),
        torch.tensor([3, 1, 3, 0], dtype=torch.int32),
        *(torch.zeros(0, dtype=torch.int32) for _ in range(4)),
    )
    anchor, computed = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    survival = torch.tensor([[1.0, 1e-40], [0.0, 0.3], [0.1, 0.1], [0.5, 0.25]])
    out = commit(
        accepted,
        torch.tensor([0, 3, 4, 7, 7], dtype=torch.int32),
        torch.arange(100, 109),
        torch.tensor([2, 0, 1, 4]),
        at,
        anchor,
        computed,
        survival,
    )
    assert isinstance(out, Committed)
    assert out.result[:, :5].tolist() == [
        [2, 3, 7, 8, -1],
        [1, 1, 9, -1, -1],
        [0, 3, 1, 2, 3],
        [0, 0, -1, -1, -1],
    ]
    result = RoundResult.unpack(out.result.numpy(), 3)
    assert result.survival is not None
    assert torch.equal(torch.from_numpy(result.survival).float(), survival)
    assert result.committed.tolist() == [2, 1, 0, 0]
    assert result.verify_lens.tolist() == [3, 1, 3, 0]
    assert out.slots.tolist() == [100, 101, -1, 103, -1, -1, -1, -1, -1]
    assert anchor.tolist()[:3] == [9, 10, 8]
    assert computed.tolist()[:3] == [7, 7, 7]
