"""The end of a network whose residual streams are sharded by token: streams to head states.

After the last sublayer each rank holds [T', S, H] streams of its own tokens and how they collapse
into one. The head wants [T, H] of all tokens on every rank. Two orders give the same bits:

    collapse, then gather    one exchange of H values a token
    gather, then collapse    two exchanges, of S * H values and of S float32 coefficients a token,
                             and every rank collapses all tokens

What comes out is not normed: the confidence head reads it as it is, the norm belongs to the logits.
"""

from typing import Literal

import torch

from engine.dist.token_owners import TokenOwners
from engine.dist.token_shards import TokenShards
from engine.kernels.hc_collapse import hc_collapse

TailOrder = Literal["collapse first", "gather first"]


def head_states(
    streams: torch.Tensor,
    pre: torch.Tensor,
    shards: TokenShards | TokenOwners | None,
    order: TailOrder = "collapse first",
) -> torch.Tensor:
    """Collapse this rank's streams and gather everyone's.

    Args:
        streams: [T', S, H], this rank's tokens, padding included.
        pre: [T', S] float32, how they collapse.
        shards: Who holds which tokens; None: every rank all of them.
        order: What comes first; `gather first` is there to be measured against.

    Returns:
        [T, H] in streams' dtype, on every rank.
    """
    if shards is None:
        return hc_collapse(streams, pre)
    if order == "collapse first":
        return shards.gather(hc_collapse(streams, pre))
    return hc_collapse(shards.gather(streams), shards.gather(pre))


def received_bytes(
    num_local: int, size: int, num_streams: int, hidden_size: int, itemsize: int
) -> dict[TailOrder, int]:
    """Bytes that a rank receives from the others, by order.

    Args:
        num_local: T', rows of every rank.
        size: Ranks.
        num_streams: S.
        hidden_size: H.
        itemsize: Bytes of a stream's element.
    """
    rows, one = (size - 1) * num_local, hidden_size * itemsize
    return {"gather first": rows * num_streams * (one + 4), "collapse first": rows * one}
