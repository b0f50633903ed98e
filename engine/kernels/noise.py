"""Counter-based noise: Philox4x32-10 (Salmon et al., 2011).

    word(key, token, position, stream, round)
        = philox(key, (token // 4, position, stream, round))[token % 4]

A draw depends on nothing but its name, so batches, order, restarts and ranks cannot change it.
Streams are disjoint by construction; a draw is never used for two decisions.
"""

import torch

from engine.kernels.contract import Dims
from engine.kernels.noise_triton import gumbel_triton, uniform_triton

DRAFT, ACCEPT, BONUS = 0, 1, 2
"""Streams: which draft token; whether it is accepted; what the target adds."""

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def philox_ref(
    key: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words per counter.

    Args:
        key: int64, two 32-bit words; broadcasts against the counters.
        c0: int64 in [0, 2**32), counter words 0 to 3.
        c1: As c0.
        c2: As c0.
        c3: As c0.

    Returns:
        Four int64 tensors in [0, 2**32), of the broadcast shape.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        # int64 products wrap, and the two 32-bit halves come out right all the same
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(
    keys: torch.Tensor, positions: torch.Tensor, stream: int, rounds: torch.Tensor | int = 0
) -> torch.Tensor:
    """One draw in (0, 1) per (key, position).

    Args:
        keys: [...] int64, Request.noise_key.
        positions: [...] int64, absolute position of the token the draw decides about.
        stream: DRAFT, ACCEPT or BONUS.
        rounds: Fourth counter word.

    Returns:
        [...] float32.
    """
    if keys.is_cuda:
        at = torch.zeros_like(positions) + rounds
        return uniform_triton(keys.contiguous(), positions.contiguous(), stream, at)
    return uniform_ref(keys, positions, stream, rounds)


def uniform_ref(
    keys: torch.Tensor, positions: torch.Tensor, stream: int, rounds: torch.Tensor | int = 0
) -> torch.Tensor:
    """`uniform` in torch: the definition a kernel is held to."""
    zero = torch.zeros_like(positions)
    word = philox_ref(keys, zero, positions, zero + stream, zero + rounds)[0]
    return _to_unit(word)


def gumbel(
    keys: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    vocab_size: int,
    rounds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gumbel noise over the vocabulary: argmax(log p + noise) is a draw from p.

    Args:
        keys: [R] int64, Request.noise_key.
        positions: [R] int64, absolute position of the token to draw.
        stream: DRAFT, ACCEPT or BONUS.
        vocab_size: V.
        rounds: [R] int64, fourth counter word; None = 0.

    Returns:
        [R, V] float32.
    """
    dims = Dims()
    dims.check("keys", keys, "R", torch.int64)
    dims.check("positions", positions, "R", torch.int64)
    at = torch.zeros_like(positions) if rounds is None else rounds
    impl = gumbel_triton if keys.is_cuda else gumbel_ref
    return impl(keys.contiguous(), positions.contiguous(), stream, vocab_size, at)


def gumbel_ref(
    keys: torch.Tensor, positions: torch.Tensor, stream: int, vocab_size: int, at: torch.Tensor
) -> torch.Tensor:
    """`gumbel` in torch: the definition a kernel is held to; `at` are the rounds."""
    quads = torch.arange((vocab_size + 3) // 4, device=keys.device)[None]
    words = philox_ref(
        keys[:, None],
        quads,
        positions[:, None],
        torch.full_like(positions, stream)[:, None],
        at[:, None],
    )
    unit = _to_unit(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])
    # the winning, large values come from small `unit`, where float32 is fine-grained
    return -(-torch.log1p(-unit)).log()


def _to_unit(word: torch.Tensor) -> torch.Tensor:
    unit = ((word.double() + 0.5) * 2.0**-32).float()
    return unit.clamp_(max=1.0 - 2.0**-24)
