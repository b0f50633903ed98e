"""Data-parallel attention: each rank computes the tokens of the requests whose state it holds.

    own tokens [T', ...] --gather--> batch [T, ...] --experts, a part on each rank--> sum --> own

Every rank has room for T' tokens, whatever it has of them, and enters every exchange with the same
shape: a rank without requests computes padding and takes part. Whose tokens are whose is found by
`engine.kernels.own_tokens`; the interface is that of `engine.dist.token_shards.TokenShards`.
"""

from dataclasses import dataclass

import torch

from engine.dist.collectives import Collectives
from engine.dist.token_shards import sum_parts
from engine.kernels.paged_attention import OwnPart


@dataclass(frozen=True, slots=True)
class TokenOwners:
    """A batch's T tokens over the ranks of `ranks`."""

    part: OwnPart
    ranks: Collectives

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T', ...] of a batch [T, ...] that all ranks have."""
        return self.part.cut(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's [T', ...] as one batch [T, ...]; one exchange. Padding is some token's."""
        return self.ranks.all_gather(x).flatten(0, 1)[self.part.place]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T', ...] of the sum over ranks of parts [T, ...]; one exchange.

        Terms are added in rank order, in float32, and rounded once. Room left over gets a copy of
        the batch's first row.
        """
        return sum_parts(part[self.part.token.flatten()], self.ranks)
