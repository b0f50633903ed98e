"""Sequence parallelism: tokens dealt to ranks in order, in shards of equal size.

    T tokens, N ranks:  T' = ceil(T / N);  rank r holds rows [r T', (r+1) T') of T tokens and zeros

Only the last ranks hold padding; with few tokens some hold nothing else. They have as many rows as
the others all the same, so that every rank enters every exchange with the same shape. What comes
back from all ranks is trimmed after the gather, never before it.
"""

from dataclasses import dataclass

import torch

from engine.dist.collectives import Collectives


@dataclass(frozen=True, slots=True)
class TokenShards:
    """T tokens over the ranks of `ranks`."""

    num_tokens: int
    ranks: Collectives

    @property
    def num_local(self) -> int:
        """T', rows of every rank; 0 only where there are no tokens at all."""
        return -(-self.num_tokens // self.ranks.size)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T', ...] of a batch [T, ...] that all ranks have."""
        rows, first = self.num_local, self.ranks.rank * self.num_local
        mine = x[first : first + rows]
        missing = rows - len(mine)
        if missing:
            mine = torch.cat((mine, x.new_zeros((missing, *x.shape[1:]))))
        return mine

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's [T', ...] as one batch [T, ...], padding cut off; one exchange."""
        if self.num_tokens == 0:
            return x  # as on every other rank
        return self.ranks.all_gather(x).flatten(0, 1)[: self.num_tokens]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T', ...] of the sum over ranks of parts [T, ...]; one exchange.

        Terms are added in rank order, in float32, and rounded once; padding is 0.
        """
        if self.num_tokens == 0:
            return part
        missing = self.ranks.size * self.num_local - self.num_tokens
        if missing:
            part = torch.cat((part, part.new_zeros((missing, *part.shape[1:]))))
        return sum_parts(part, self.ranks)


def sum_parts(part: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """This rank's rows [T', ...] of the sum over N ranks of parts [N * T', ...]; one exchange.

    Terms are added in rank order, in float32, and rounded once.
    """
    received = torch.empty_like(part)
    ranks.all_to_all_single(received, part.contiguous())
    terms = received.view(ranks.size, -1, *part.shape[1:])
    return terms.float().sum(dim=0).to(part.dtype)
