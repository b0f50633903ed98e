"""Which rows of an Engram table an n-gram has: token ids made fewer, and numbers to hash them by.

Tokens that read alike (" The", "the", "THE") share an id, numbered in order of appearance. Each
order of n-gram and each hash head has a range of a layer's table as wide as a prime; primes ascend
from a size on and none is taken twice. Nothing of this is stored in checkpoints: it follows from
the tokenizer and the config, and a difference anywhere would hash every n-gram to another row.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_LONE_SPACE = "\ue000"
"""Stands for a token that is one space, which stripping would take away."""

# [ckpt] as the released code draws multipliers; config.json has its tables' sizes, not these
_SEED = 10007


def alike_tokens(tokenizer: Path) -> list[int]:
    """By token id, a smaller number that tokens which read alike have in common.

    Args:
        tokenizer: A tokenizer.json, which has been read before as the network's own.
    """
    # slow to import: only for networks with such tables
    from tokenizers import Regex, Tokenizer, normalizers

    read = Tokenizer.from_file(str(tokenizer))
    reads_as = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    found = []
    for token in range(read.get_vocab_size(with_added_tokens=True)):
        text = read.decode([token], skip_special_tokens=False)
        # part of a character reads as nothing: such tokens are told apart by their bytes
        key = read.id_to_token(token) if "\ufffd" in text else reads_as.normalize_str(text) or text
        found.append(numbers.setdefault(key or "", len(numbers)))
    return found


def bucket_sizes(layers: int, orders: int, heads: int, start: int) -> list[tuple[int, ...]]:
    """Widths of the ranges of each layer's table: by order of n-gram, then by head.

    Args:
        layers: Tables.
        orders: Of n-grams, 2 and up.
        heads: Hashes of each.
        start: No width is below it.
    """
    taken: set[int] = set()
    found = []
    for _ in range(layers):
        sizes = list[int]()
        for _ in range(orders):
            primes = (p for p in _primes(start) if p not in taken)
            for _ in range(heads):
                sizes.append(next(primes))
                taken.add(sizes[-1])
        found.append(tuple(sizes))
    return found


def _primes(start: int) -> Iterator[int]:
    """From `start` on."""
    number = start
    while True:
        if number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


def multipliers(layer: int, count: int, vocab_size: int) -> list[int]:
    """Odd numbers, one for a token and each of those before it; no product leaves 64 bits.

    Args:
        layer: Its number in the network.
        count: Tokens of the longest n-gram.
        vocab_size: Numbers that tokens may have.
    """
    bound = max(1, int(np.iinfo(np.int64).max) // vocab_size // 2)
    drawn = np.random.default_rng(_SEED * layer).integers(0, bound, size=count, dtype=np.int64)
    return [int(n) * 2 + 1 for n in drawn]
