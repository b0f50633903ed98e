"""Engram (DeepSeek-V4.1): layers whose streams are fed from tables of n-grams.

The n-grams that end at a token, of 2 tokens and up, are hashed to rows of a layer's table; the rows
side by side, e, give a key a stream and one value:

    [k_1 .. k_S ; v] = W e
    d_j = mean_c(R_j[c] k_j[c] w_j[c]) sqrt(H) / (rms(R_j) rms(k_j))
    R_j += sigmoid(sign(d_j) sqrt(max(|d_j|, 1e-6))) v

Rows of tables are dealt to ranks, which give 0 for those they do not hold. Ids of the last tokens
are kept by place in rings, as `engine.kernels.rolling` says: a draft that is rejected undoes
nothing, and before the first token there is the padding token.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.dist.token_owners import TokenOwners
from engine.dist.token_shards import TokenShards
from engine.errors import CheckpointError
from engine.kernels.packed import e8m0
from engine.kernels.rolling import TokenPlaces, ring_store, token_places
from engine.models.deepseek_v4_spec import EngramSpec, V4Layers
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.deepseek_v41_hashes import alike_tokens, multipliers

if TYPE_CHECKING:
    from engine.models.deepseek_v4_layers import V4Step

_LEAST = 1e-6
_GROUP = 32
"""Numbers of a row that share a scale."""

_TOKENS = 1024
"""Tokens whose float32 streams are held at once."""


class NgramRows:
    """Token ids to rows of all tables."""

    def __init__(self, spec: EngramSpec, vocab_size: int, weights: V4Weights) -> None:
        self.spec, device = spec, weights.at.device
        numbers = [0] * vocab_size
        if device.type != "meta":
            assert weights.folder is not None
            numbers = _numbers(spec, vocab_size, weights.folder / "tokenizer.json")
        self.numbers = torch.tensor(numbers, dtype=torch.int64, device=device)
        self.pad = numbers[spec.pad_token_id]
        drawn = [multipliers(layer, spec.longest, spec.num_numbers) for layer in spec.layers]
        self.multipliers = torch.tensor(drawn, dtype=torch.int64, device=device)
        sizes = torch.tensor(spec.buckets, dtype=torch.int64)
        firsts = sizes.cumsum(dim=1) - sizes
        # by layer, order of n-gram, and head
        self.sizes = sizes.unflatten(1, (-1, spec.num_heads)).to(device)
        self.firsts = firsts.unflatten(1, (-1, spec.num_heads)).to(device)

    def __call__(self, step: "V4Step") -> torch.Tensor:
        """[layers, T, columns] int64 of all tokens; keeps the step's, or this rank's own."""
        ids, owners = step.token_ids, None
        if isinstance(step.shards, TokenOwners):
            owners = step.shards
            ids = owners.cut(ids)
        ring = step.state.tokens
        assert ring is not None
        at = step.places or token_places(step.batch, len(step.positions))
        numbers = self.numbers[ids]
        found, hashed = [], None
        for back in range(self.spec.longest):
            token = self._before(numbers, ring, step.positions, at, back)
            product = token * self.multipliers[:, back, None]
            hashed = product if hashed is None else hashed ^ product
            if back:
                order = back - 1
                row = hashed[:, :, None] % self.sizes[:, None, order]
                found.append(row + self.firsts[:, None, order])
        ring_store(ring, numbers, step.positions, None, at)
        rows = torch.cat(found, dim=2)
        # tables are dealt: every rank looks up its rows of every token
        return rows if owners is None else owners.gather(rows.transpose(0, 1)).transpose(0, 1)

    def _before(
        self,
        numbers: torch.Tensor,
        ring: torch.Tensor,
        positions: torch.Tensor,
        at: TokenPlaces,
        back: int,
    ) -> torch.Tensor:
        """[T]: the token so many places before each."""
        place = positions - back
        token = torch.arange(len(positions), device=positions.device)
        here = numbers[(token - back).clamp(min=0)]
        kept = ring[at.row, place % ring.shape[1]]  # padding reads the last row, which is spare
        found = torch.where(place >= at.start, here, kept)
        return torch.where(place >= 0, found, self.pad)


def _numbers(spec: EngramSpec, vocab_size: int, tokenizer: Path) -> list[int]:
    """By token id; those that no text has count as padding."""
    found = alike_tokens(tokenizer)
    if max(found) + 1 != spec.num_numbers:
        raise CheckpointError(
            f"{tokenizer} has {max(found) + 1} tokens that read differently, config.json's "
            f"engram_compressed_vocab_size is {spec.num_numbers}: n-grams would be other rows",
            "use the tokenizer of the same checkpoint",
        )
    return found + [found[spec.pad_token_id]] * (vocab_size - len(found))


class EngramTable:
    """This rank's rows of one table."""

    def __init__(self, spec: EngramSpec, rows: int, weights: V4Weights, prefix: str) -> None:
        self.dtype = weights.at.dtype
        part = weights.at.share.even(rows, dim=0)
        self.first = 0 if part is None else part.start
        self.weight, self.scale = weights.rows(f"{prefix}embed", rows, spec.width, _GROUP, part)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, columns] int64 to [T, columns * D]; 0 for what other ranks hold."""
        at = rows - self.first
        held = (at >= 0) & (at < len(self.weight))
        at = at.clamp(0, max(len(self.weight) - 1, 0))
        if self.scale is None:
            found = self.weight[at]
        else:
            # bytes: not every op knows eight-bit floats
            found = self.weight.view(torch.uint8)[at].view(self.weight.dtype).float()
            found = found * e8m0(self.scale[at]).repeat_interleave(_GROUP, dim=-1)
        return found.to(self.dtype).masked_fill(~held[..., None], 0).flatten(1)


class Engram:
    """One layer's: its table, and the way from rows into the streams."""

    def __init__(
        self, spec: EngramSpec, which: int, layers: V4Layers, weights: V4Weights, prefix: str
    ) -> None:
        """Read one layer's tensors.

        Args:
            spec: Of all such layers.
            which: Its place among them.
            layers: The stack's shape.
            weights: Its tensors.
            prefix: E.g. `layers.1.engram.`.
        """
        self.ranks, self.eps, self.which = weights.at.ranks, layers.norm_eps, which
        h, s = layers.hidden_size, layers.hyper.num_streams
        self.table = EngramTable(spec, spec.rows[which], weights, prefix)
        width = len(spec.buckets[which]) * spec.width
        self.kv = weights.matrix([f"{prefix}wkv"], [(s + 1) * h], width)
        # only their product is ever used
        q, k = (weights.wide(f"{prefix}{n}_weight", s, h) for n in "qk")
        self.weight = q * k

    def __call__(
        self,
        streams: torch.Tensor,
        rows: torch.Tensor,
        shards: TokenShards | TokenOwners | None,
    ) -> torch.Tensor:
        """Streams [T, S, H] of all tokens or of this rank's, and rows of all [layers, T, C]."""
        found = self.table(rows[self.which])
        found = self.ranks.all_reduce(found) if shards is None else shards.sum(found)
        out = torch.empty_like(streams)
        pieces = zip(*(x.split(_TOKENS) for x in (streams, found, out)), strict=True)
        for piece, each, into in pieces:
            into.copy_(self._fed(piece, self.kv(each)))
        return out

    def _fed(self, streams: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """[T, S, H] float32 of streams and of keys and a value side by side [T, (S + 1) H]."""
        wide, h = streams.float(), streams.shape[2]
        keys, value = kv[:, :-h].float().unflatten(1, (-1, h)), kv[:, -h:].float()
        dots = (wide * self.weight * keys).sum(dim=2) * h**-0.5
        for x in (wide, keys):  # each stream and each key by itself
            dots = dots * torch.rsqrt(x.square().mean(dim=2) + self.eps)
        gates = torch.sigmoid(torch.copysign(dots.abs().clamp(min=_LEAST).sqrt(), dots))
        return wide + gates[:, :, None] * value[:, None]
