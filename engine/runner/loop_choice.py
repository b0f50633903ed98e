"""From which batch size on each rank drafts for its own requests only.

The sharded loop does 1/N of the Markov chain and moves 1/N of the logits, but its exchanges depend
on each other: with few requests it may cost more than it saves. Where the two cross depends on the
machine, so both are run at start-up, on a greedy batch, which saves least. Rank 0's times decide.
"""

import logging
from collections.abc import Callable

import torch

from engine.dist.group import Group
from engine.dist.timing import milliseconds
from engine.runner.out_of_memory import release_caches
from engine.runner.owners import Sampling
from engine.runner.steps import Steps

_log = logging.getLogger(__name__)
_MARGIN = 0.99
"""The sharded loop has to be at least 1 % faster: a measured tie is no reason to change."""


def choose_loop(steps: Steps, group: Group, asked: str, max_num_seqs: int) -> int | None:
    """Decide, and say so once.

    Args:
        steps: The device side, of this rank.
        group: All ranks; each has to call this.
        asked: auto, on or off.
        max_num_seqs: N, the largest batch.

    Returns:
        Batch size from which the loop is sharded; None: it stays replicated.
    """
    if group.size == 1 or steps.net.draft is None:
        return None
    if asked == "on":
        return 1
    if asked == "off":
        _log.info("the draft loop runs on every rank: --sharded-loop off")
        return None
    times = [(size, *_measure(steps, size)) for size in _sizes(max_num_seqs)]
    found = group.tell(_crossing(times))
    shown = ", ".join(f"{n}: {s:.2f} and {r:.2f}" for n, s, r in times)
    told = f"measured ms by batch size, sharded and replicated: {shown}"
    release_caches(steps.rows.device)
    if found is None:
        _log.info("the draft loop runs on every rank: sharding it does not pay (%s)", told)
    else:
        _log.info("the draft loop is sharded from %d requests (%s)", found, told)
    return None if found is None else int(found)


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... and the largest batch."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def _crossing(times: list[tuple[int, float, float]]) -> int | None:
    """Smallest size from which the sharded loop is faster at every measured size.

    Args:
        times: (batch size, ms sharded, ms replicated), sizes rising.
    """
    found = None
    for size, sharded, replicated in reversed(times):
        if sharded > _MARGIN * replicated:
            break
        found = size
    return found


@torch.inference_mode()
def _measure(steps: Steps, num_reqs: int) -> tuple[float, float]:
    """Milliseconds of both loops, sharded first, in an order that a drift does not favour."""
    draft, device = steps.net.draft, steps.rows.device
    assert draft is not None
    shape = (num_reqs, steps.net.num_speculative_tokens, draft.spec.layers.hidden_size)
    hidden = torch.zeros(shape, dtype=steps.net.target.embedding.dtype, device=device)
    index = torch.full((num_reqs,), steps.rows.spare, device=device)
    sampling = Sampling(steps.rows.params(index), sampled=False, filtered=False)
    zeros = torch.zeros_like(index)

    def spent(loop: Callable[..., object]) -> float:
        return milliseconds(
            lambda: loop(hidden, zeros, zeros, sampling),
            device,
            calls=4 if device.type == "cuda" else 1,
            repeats=5 if device.type == "cuda" else 3,
        )

    sharded, replicated = steps.owners.draft_sharded, steps.owners.draft_replicated
    order = (sharded, replicated, replicated, sharded)
    a, b, c, d = (spent(loop) for loop in order)
    return min(a, d), min(b, c)
