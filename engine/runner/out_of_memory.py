"""Telling that a device ran out of memory from everything else that may go wrong."""

import gc

import torch

_TEXTS = (
    "out of memory",  # the driver, outside torch's allocator: graphs, modules, pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # torch's CPU allocator
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Is lack of memory the reason, or the reason of what it was raised during?

    A capture that fails halfway ends in an error of its own; the first one is its context.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException) -> str:
    """What it says, without what follows on later lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def release_caches(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
