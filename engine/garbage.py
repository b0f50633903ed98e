"""Python's garbage collector beside a loop that a device waits for."""

import gc

import torch


def settle(device: torch.device) -> None:
    """Leave what there is now out of all later collections, where a device waits for the host.

    For processes that live for one engine. Else a full collection now and then looks at all that
    loading has made, torch itself included: tenths of a second in which a device has nothing to do.
    """
    if device.type == "cuda":
        gc.collect()
        gc.freeze()
