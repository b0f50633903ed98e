"""Sizes of rounds: requests, and verify tokens for each of them."""

from bisect import bisect_left


def graph_tiers(most: int) -> list[int]:
    """Batch sizes to capture, up to `most` requests: steps of 1/8 of the size, at least 1.

    Padding then wastes at most an eighth of a round, and there are about 8 tiers an octave.
    """
    tiers, size = [], 1
    while size < most:
        tiers.append(size)
        size += max(1, 1 << max(size.bit_length() - 4, 0))
    return [*tiers, most]


class Tiers:
    """What may be captured. Few token tiers: each is a capture of a large part of a second.

    Args:
        max_num_seqs: The largest batch.
        gamma: G.
    """

    def __init__(self, max_num_seqs: int, gamma: int) -> None:
        self.requests = graph_tiers(max_num_seqs)
        self.widths = sorted({min(w, gamma + 1) for w in (2, 3, 4, 6)} | {gamma + 1})

    def fit(self, num_reqs: int) -> int:
        """The smallest tier for `num_reqs` requests."""
        return self.requests[bisect_left(self.requests, num_reqs)]

    def tokens(self, requests: int) -> list[int]:
        """Verify tokens of the tier `requests`, rising; the last holds every draft."""
        return [requests * width for width in self.widths]


class EagerSizes:
    """Rounds that are not captured take their exact size, but not every number of tokens.

    A CPU's matrix products prepare themselves for each number of rows when they first meet it. With
    the demo pair that is 3.5 of a round's 17 ms, and a budget is another one nearly every round.

    Args:
        max_num_seqs: The largest batch.
        gamma: G.
    """

    def __init__(self, max_num_seqs: int, gamma: int) -> None:
        self._width = gamma + 1
        self._grid = graph_tiers(max_num_seqs * self._width)

    def fit(self, num_reqs: int) -> int:
        """The batch as it is."""
        return num_reqs

    def tokens(self, requests: int) -> list[int]:
        """Verify tokens of `requests` requests, rising, from anchors alone to every draft."""
        whole = requests * self._width
        return sorted({requests, whole, *(t for t in self._grid if requests < t < whole)})
