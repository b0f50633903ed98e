"""Results that a kernel puts where the host reads them."""

import pytest
import torch

from engine.kernels.copy_to_host import copy_to_host
from tests.helpers.triton import INTERPRETED, KERNEL_DEVICE, needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("shape", [(1, 3), (256, 17), (5,), (1024,), (0, 4), ()])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_every_value_arrives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    result = torch.randint(-(2**31), 2**31 - 1, shape).to(KERNEL_DEVICE, dtype)
    there = torch.full(shape, 77, dtype=dtype, pin_memory=not INTERPRETED)
    copy_to_host(there, result)
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert torch.equal(there, result.cpu())


def test_of_values_that_do_not_lie_side_by_side_only_they() -> None:
    wide = torch.arange(60, device=KERNEL_DEVICE).view(6, 10)
    there = torch.full((8, 4), -1, pin_memory=not INTERPRETED)
    copy_to_host(there[:6], wide[:, 3:7])
    if not INTERPRETED:
        torch.cuda.synchronize()
    assert torch.equal(there[:6], wide[:, 3:7].cpu())
    assert bool((there[6:] == -1).all())


def test_another_shape_or_dtype_is_refused() -> None:
    result = torch.zeros(3, 4, dtype=torch.int64, device=KERNEL_DEVICE)
    wide = torch.zeros(3, 8, dtype=torch.int64)
    for there in (wide[:, :3], wide[:, :4], torch.zeros(3, 4, dtype=torch.int32)):
        with pytest.raises(ValueError, match="not as result"):
            copy_to_host(there, result)
