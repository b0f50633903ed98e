"""Noise inside kernels: the words of `engine.kernels.noise`, bit for bit, and Gumbel noise of them.

A kernel that needs noise calls `philox`, `unit` and `gumbel_tile` where it uses it, so noise is
never stored: [256, 151936] float32 would be 156 MB a position. The launches here are for draws by
themselves. Words and uniforms equal the reference's exactly, noise to some units in the last place:
it takes the GPU's own logarithm, without which a draw would cost twice as much.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Four words of a counter (Salmon et al., 2011); all uint32, and they broadcast."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def unit(word):
    """(word + 0.5) / 2**32 rounded once to float32, below 1."""
    # both halves are exact, so their sum is the only rounding
    low = (word & 0xFFFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    return tl.minimum((word >> 16).to(tl.float32) * 1.52587890625e-05 + low, 0.99999994)


@triton.jit
def fast_log(x):
    """log(x): absolute error 2e-7 near 1, relative elsewhere."""
    return tl.log(x) if _INTERPRETED else libdevice.fast_logf(x)


@triton.jit
def key_words(key):
    """The two uint32 words of an int64 key."""
    return (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def noise_words(key, first_quad, position, stream, rounds, QUADS: tl.constexpr):
    """Words of 4 * QUADS tokens from token 4 * first_quad on.

    Args:
        key: [n] int64.
        first_quad: Scalar.
        position: [n] int64.
        stream: Scalar.
        rounds: [n] int64.
        QUADS: Counters a row.

    Returns:
        [n, 4 * QUADS] uint32.
    """
    k0, k1 = key_words(key)
    quad = (first_quad + tl.arange(0, QUADS)).to(tl.uint32)[None, :]
    zero = tl.zeros_like(quad)
    w0, w1, w2, w3 = philox(
        k0[:, None],
        k1[:, None],
        quad,
        position.to(tl.uint32)[:, None],
        zero + stream,
        rounds.to(tl.uint32)[:, None],
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel_tile(key, first_quad, position, stream, rounds, QUADS: tl.constexpr):
    """[n, 4 * QUADS] float32 Gumbel noise; arguments as `noise_words`."""
    u = unit(noise_words(key, first_quad, position, stream, rounds, QUADS))
    # -log(1 - u): the large noise comes from small u, where 1 - u would round it away
    series = 1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7))))))
    return -fast_log(tl.where(u < 0.125, u * series, -fast_log(1.0 - u)))


@triton.jit
def uniform_at(key, position, stream, rounds):
    """One uniform per (key, position): word 0 of counter 0. All [n] int64, stream a scalar."""
    k0, k1 = key_words(key)
    at = position.to(tl.uint32)
    zero = tl.zeros_like(at)
    word, _, _, _ = philox(k0, k1, zero, at, zero + stream, rounds.to(tl.uint32))
    return unit(word)


def words_triton(
    keys: torch.Tensor, positions: torch.Tensor, stream: int, vocab_size: int, rounds: torch.Tensor
) -> torch.Tensor:
    """[R, V] int64 in [0, 2**32): the words themselves, for tests."""
    out = torch.empty((len(keys), vocab_size), dtype=torch.int64, device=keys.device)
    return _launch(out, keys, positions, stream, rounds)


def gumbel_triton(
    keys: torch.Tensor, positions: torch.Tensor, stream: int, vocab_size: int, rounds: torch.Tensor
) -> torch.Tensor:
    """`gumbel` as one launch; rounds [R] int64."""
    out = torch.empty((len(keys), vocab_size), dtype=torch.float32, device=keys.device)
    return _launch(out, keys, positions, stream, rounds)


def uniform_triton(
    keys: torch.Tensor, positions: torch.Tensor, stream: int, rounds: torch.Tensor
) -> torch.Tensor:
    """`uniform` as one launch; keys, positions and rounds [n] int64."""
    out = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    num, block = out.numel(), 128
    _uniform_kernel[(triton.cdiv(num, block),)](
        out, keys, positions, rounds, num, STREAM=stream, BLOCK=block
    )
    return out


def _launch(
    out: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    rounds: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocab_size = out.shape
    quads = min(256, triton.next_power_of_2(triton.cdiv(vocab_size, 4)))
    _noise_kernel[(num_rows, triton.cdiv(vocab_size, 4 * quads))](
        out,
        keys,
        positions,
        rounds,
        V=vocab_size,
        STREAM=stream,
        WORDS=out.dtype == torch.int64,
        QUADS=quads,
    )
    return out


@triton.jit
def _noise_kernel(
    out_ptr,  # [R, V], out
    keys_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    rounds_ptr,  # [R] int64
    V: tl.constexpr,
    STREAM: tl.constexpr,
    WORDS: tl.constexpr,
    QUADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    quad = tl.program_id(1) * QUADS
    key, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)
    rounds = tl.load(rounds_ptr + row)
    token = quad * 4 + tl.arange(0, 4 * QUADS)
    at = out_ptr + row[:, None] * V + token[None, :]
    if WORDS:
        value = noise_words(key, quad, position, STREAM, rounds, QUADS).to(tl.int64)
    else:
        value = gumbel_tile(key, quad, position, STREAM, rounds, QUADS)
    tl.store(at, value, mask=(token < V)[None, :])


@triton.jit(do_not_specialize=["num"])
def _uniform_kernel(
    out_ptr,  # [n] float32, out
    keys_ptr,  # [n] int64
    positions_ptr,  # [n] int64
    rounds_ptr,  # [n] int64
    num,  # n
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < num
    key = tl.load(keys_ptr + i, mask=live, other=0)
    position = tl.load(positions_ptr + i, mask=live, other=0)
    rounds = tl.load(rounds_ptr + i, mask=live, other=0)
    tl.store(out_ptr + i, uniform_at(key, position, STREAM, rounds), mask=live)
