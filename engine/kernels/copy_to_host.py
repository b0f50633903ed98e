"""Results to pinned memory of the host, by a kernel.

A copy by the device's copy engine stands between two rounds, and the stream changes engines twice.
Results are small, and pinned memory has one address for host and device. (H200, one request of the
8B shape, `bench round`: a gap of 0.02 ms a round before, 0.01 after.)
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def copy_to_host(there: torch.Tensor, result: torch.Tensor) -> None:
    """Put `result` into `there`, in the order of the current stream; does not wait.

    Args:
        there: Contiguous, pinned, of result's shape and dtype.
        result: On a device.
    """
    alike = there.shape == result.shape and there.dtype == result.dtype
    if not (alike and there.is_contiguous()):
        raise ValueError(
            f"there: {there.dtype} {tuple(there.shape)} {there.stride()}, not as result"
        )
    result = result.contiguous()
    if count := result.numel():
        _copy_kernel[(triton.cdiv(count, _BLOCK),)](there, result, count, BLOCK=_BLOCK)


@triton.jit(
    do_not_specialize=["count"], do_not_specialize_on_alignment=["to_ptr", "from_ptr"]
)  # one kernel for all results
def _copy_kernel(
    to_ptr,  # [count], out
    from_ptr,  # [count]
    count,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + at, tl.load(from_ptr + at, mask=at < count), mask=at < count)
