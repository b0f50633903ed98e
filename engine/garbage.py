"""Python's garbage collector beside a loop that a device waits for."""

import gc


def settle() -> None:
    """Leave what there is now out of all later collections; for processes that live for one engine.

    Else a full collection now and then looks at all that loading has made, torch itself included:
    tenths of a second in which a device has nothing to do.
    """
    gc.collect()
    gc.freeze()
