"""Philox: published answers, range, and streams that do not meet."""

import torch

from engine.kernels.noise import ACCEPT, BONUS, DRAFT, gumbel, philox_ref, uniform


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([v], dtype=torch.int64) for v in values]


def signed(low: int, high: int) -> torch.Tensor:
    value = low | high << 32
    return torch.tensor([value - (1 << 64) if value >> 63 else value])


def test_known_answers() -> None:
    """The three test vectors of the Random123 distribution for philox4x32-10."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, want in cases:
        got = philox_ref(signed(*key), *words(*counter))
        assert tuple(int(w) for w in got) == want


def test_draws_do_not_depend_on_the_batch() -> None:
    keys, positions = torch.tensor([3, -9, 2**62]), torch.tensor([0, 5, 70000])
    together = gumbel(keys, positions, BONUS, 301)
    for i in range(3):
        alone = gumbel(keys[i : i + 1], positions[i : i + 1], BONUS, 301)
        assert torch.equal(together[i : i + 1], alone)
    assert torch.equal(gumbel(keys, positions, BONUS, 1000)[:, :301], together)


def test_every_part_of_the_name_matters() -> None:
    """Key, position, stream, round: each gives other noise. One equal draw has odds < 1e-6."""
    one = torch.tensor([1])
    base = gumbel(one, one, DRAFT, 64)
    others = [
        gumbel(one + 1, one, DRAFT, 64),
        gumbel(one + (1 << 40), one, DRAFT, 64),
        gumbel(one, one + 1, DRAFT, 64),
        gumbel(one, one, ACCEPT, 64),
        gumbel(one, one, BONUS, 64),
        gumbel(one, one, DRAFT, 64, rounds=one),
    ]
    assert all(not (other == base).any() for other in others)


def test_uniform_is_uniform_and_open() -> None:
    """Kolmogorov-Smirnov on 100,000 draws: P(D > 0.0075) < 3e-5, and the keys are fixed."""
    n = 100_000
    u = uniform(torch.arange(n), torch.full((n,), 17), ACCEPT)
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    grid = (torch.arange(n) + 1) / n
    assert float((u.sort().values - grid).abs().max()) < 0.0075


def test_gumbel_max_draws_from_the_weights() -> None:
    """200,000 draws: each frequency within 5 sigma, false-alarm odds < 6e-7 a cell."""
    n, probs = 200_000, torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    noise = gumbel(torch.arange(n), torch.full((n,), 3), BONUS, 5)
    counts = torch.bincount((probs.log() + noise).argmax(dim=-1), minlength=5)
    sigma = (n * probs * (1 - probs)).sqrt()
    assert bool(((counts - n * probs).abs() < 5 * sigma).all())
