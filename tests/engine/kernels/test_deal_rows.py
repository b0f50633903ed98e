"""Rows to owners: kernel against reference, exactly; the reference in runner/test_ownership.py."""

import pytest
import torch

from engine.kernels.deal_rows import deal_rows, deal_rows_ref, deal_rows_triton
from tests.helpers.triton import KERNEL_DEVICE, needs_triton

pytestmark = pytest.mark.usefixtures("poison")


@needs_triton
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    "lens", [[8], [1], [0], [8] * 16, [3, 1, 8, 2, 5, 0, 0], [1] * 300, [4, 0, 7, 0, 1]]
)
def test_deal_rows(lens: list[int], size: int) -> None:
    cu = torch.tensor([0, *lens]).cumsum(0).int().to(KERNEL_DEVICE)
    room = max(sum(lens[rank::size]) for rank in range(size)) + 300
    for rank in (0, size - 1):
        for more in (0, -299):
            got = deal_rows_triton(cu, rank, size, room + more)
            for a, b in zip(got, deal_rows_ref(cu, rank, size, room + more), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_by_hand() -> None:
    """Requests of 2, 1 and 3 rows on two ranks: 0 and 2 belong to rank 0, 1 to rank 1."""
    token, owned = deal_rows(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 0, 2, 6)
    assert token.tolist() == [0, 1, 3, 4, 5, 0, 2, 0, 0, 0, 0, 0]
    assert owned.tolist() == [0, 2, 5]
    _, owned = deal_rows(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 1, 2, 6)
    assert owned.tolist() == [0, 1, 1]
