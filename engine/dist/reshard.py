"""Logits from parts of the vocabulary to whole rows, for every rank or for a row's owner only.

    gather    [T, V/N] on each rank -> [T, V] on each:              T V (N-1)/N numbers received
    exchange  [N T', V/N] on each, rows by owner -> [T', V] there:  T' V (N-1)/N numbers received

With T = N T' the exchange moves 1/N of what the gather does, and holds 1/N of it.
"""

import torch

from engine.dist.collectives import Collectives


def gather_vocab(part: torch.Tensor, vocab_size: int, ranks: Collectives) -> torch.Tensor:
    """Whole rows on every rank.

    Args:
        part: [T, W], this rank's W = V/N (rounded up) columns of every row.
        vocab_size: V; columns past it are padding and are cut off.
        ranks: Who holds the parts.

    Returns:
        [T, V].
    """
    if ranks.size == 1:
        return part
    return _side_by_side(ranks.all_gather(part), vocab_size)


def exchange_vocab(part: torch.Tensor, vocab_size: int, ranks: Collectives) -> torch.Tensor:
    """Whole rows at their owners.

    Args:
        part: [N * T', W], this rank's columns of every row; the T' rows that rank 0 owns first.
        vocab_size: V.
        ranks: Who holds the parts, and owns rows.

    Returns:
        [T', V], the rows this rank owns.
    """
    if ranks.size == 1:
        return part
    received = torch.empty_like(part)
    ranks.all_to_all_single(received, part)
    return _side_by_side(received.view(ranks.size, -1, part.shape[1]), vocab_size)


def _side_by_side(parts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[N, T, W] to [T, V]."""
    rows = parts.transpose(0, 1).flatten(1)
    # only where the parts are padded is there something to cut, at the price of a copy
    return rows if rows.shape[1] == vocab_size else rows[:, :vocab_size].contiguous()
