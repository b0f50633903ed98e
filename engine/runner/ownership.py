"""Who decides for whom: the request at batch position i belongs to rank i % N.

Every rank has room for `capacity` = ceil(R/N) requests, so that shapes depend on R alone. In
owner-major order rank 0's requests come first, then rank 1's, ...; room that is left over points to
request 0, whose results there nobody reads.
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from engine.kernels.deal_rows import deal_rows


class OwnedRows(NamedTuple):
    """Ragged rows dealt to owners: N ranks, c requests and T' rows each."""

    token: torch.Tensor  # [N * T'] int64, rows in owner-major order; room left over: row 0
    cu_seqlens: torch.Tensor  # [c+1] int32, where this rank's requests begin among its T' rows


class Ownership:
    """R requests dealt to N ranks; what follows from R and N alone is made once."""

    def __init__(self, num_reqs: int, rank: int, size: int, device: torch.device) -> None:
        """Deal.

        Args:
            num_reqs: R.
            rank: This rank.
            size: N.
            device: Where batches are.
        """
        self.num_reqs, self.rank, self.size = num_reqs, rank, size
        self.capacity = -(-num_reqs // size)
        """c: requests a rank has room for."""

        place = torch.arange(self.capacity * size, device=device).view(self.capacity, size).t()
        place = torch.where(place < num_reqs, place, 0)
        self.order = place.flatten()
        """[N * c] int64: batch positions in owner-major order."""

        self.mine = place[rank].contiguous()
        """[c] int64: this rank's batch positions."""

    def in_batch_order(self, owned: torch.Tensor) -> torch.Tensor:
        """[N, c, ...], what every owner says of its requests, to [R, ...]."""
        return owned.transpose(0, 1).flatten(0, 1)[: self.num_reqs]

    def rows(self, cu_seqlens: torch.Tensor, num_tokens: int, most: int) -> OwnedRows:
        """Deal the rows of a ragged batch to the owners of their requests.

        Args:
            cu_seqlens: [R+1] int32; `most` rows a request at most.
            num_tokens: T, padding included.
            most: Rows of a request at most.

        Returns:
            T' = `room` rows an owner, whatever the lengths are.
        """
        room = self.room(num_tokens, most)
        return OwnedRows(*deal_rows(cu_seqlens, self.rank, self.size, room))

    def room(self, num_tokens: int, most: int) -> int:
        """T', rows an owner has room for.

        L live requests, the first ones, have a row each and T - L more between them; rank 0 has
        most of them. Padding has none, so that a lone request in two slots may have all T.
        """
        return _room(self.num_reqs, self.size, num_tokens, most)


@lru_cache(maxsize=4096)  # rounds that are not captured ask every time
def _room(num_reqs: int, size: int, num_tokens: int, most: int) -> int:
    found = 0
    for live in range(1, min(num_reqs, num_tokens) + 1):
        mine = -(-live // size)
        found = max(found, min(mine * most, mine + num_tokens - live))
    return found
