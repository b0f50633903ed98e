"""DeepSeek-V4 targets fed by hand: any tokens of some sequences, from any position on.

network = load(folder)
fed = Fed(network, 2, longest=140, most=5)
first, second = fed.feed([(0, 0, ids), (1, 0, others)])     # logits
"""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engine.kernels.paged_attention import AttentionBatch, locate_kv
from engine.kv.rolling import RollingState
from engine.models import families
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_layers import layer_shapes
from engine.models.layers import Placement
from engine.models.loader import Checkpoint
from engine.models.target_config import parse_target

AT = Placement(torch.float32, torch.device("cpu"))


def load(folder: Path, num_positions: int = 512) -> DeepseekV4:
    """The target in a folder; every tensor is used, or is the drafter's."""
    spec = parse_target(folder)
    with Checkpoint(folder) as weights:
        network = families.build_target(spec, weights, AT, num_positions)
        weights.finish(partial(families.belongs_elsewhere, spec))
    assert isinstance(network, DeepseekV4)
    return network


class Fed:
    """Some sequences of one network, fed a stretch at a time from any position on."""

    def __init__(self, network: DeepseekV4, count: int, longest: int, most: int) -> None:
        self.network = network
        block = max(network.spec.layers.ratio(i) for i in range(network.spec.layers.num_layers))
        self.block = max(block, 4)
        each = -(-longest // self.block)
        # blocks of different sequences lie between each other
        self.blocks = [list(range(i, count * each, count)) for i in range(count)]
        shapes = layer_shapes(network.spec.layers)
        self.state = RollingState.allocate(
            shapes,
            count + 1,
            count * each,
            self.block,
            most,
            dtype=AT.dtype,
            device=AT.device,
            lookback=network.spec.lookback,
        )
        for layer in self.state.layers:  # what was never written is never read
            for state in (layer.compressed, layer.index):
                if state is not None:
                    state.entries.fill_(float("nan"))
                    state.rows.fill_(float("nan"))
            layer.window.fill_(float("nan"))
        if self.state.tokens is not None:
            self.state.tokens.fill_(1 << 40)

    def batch(
        self, many: Sequence[tuple[int, int, Sequence[int]]]
    ) -> tuple[AttentionBatch, torch.Tensor]:
        """A step of (sequence, first position, its n tokens) each; and every token's position."""
        counts = [len(ids) for _, _, ids in many]
        stops = [start + len(ids) for _, start, ids in many]
        found = AttentionBatch(
            block_table=torch.zeros(len(many), 1, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor(stops).int(),
            kv_block_size=self.block,
            query_lens=tuple(counts),
            kv_lens=tuple(stops),
            kv_index=tuple(
                locate_kv(self.blocks[i], stop, self.block, AT.device)
                for (i, _, _), stop in zip(many, stops, strict=True)
            ),
            rows=torch.tensor([i for i, _, _ in many]),
        )
        places = [p for _, s, each in many for p in range(s, s + len(each))]
        return found, torch.tensor(places)

    @torch.inference_mode()
    def feed(self, many: Sequence[tuple[int, int, Sequence[int]]]) -> list[torch.Tensor]:
        """Logits [n, V] of each (sequence, first position, its n tokens)."""
        batch, places = self.batch(many)
        ids = torch.tensor([t for _, _, each in many for t in each])
        hidden, _ = self.network.forward(ids, places, places, batch, self.state)
        return list(self.network.logits(hidden).split(batch.query_lens))


def feed_with_rejections(
    fed: Fed,
    rng: random.Random,
    truth: list[list[int]],
    want: list[torch.Tensor],
    gamma: int,
    tolerance: dict[str, float],
) -> set[int]:
    """Feed two sequences in ragged batches, any number of wrong tokens behind right ones.

    Args:
        fed: Rows 0 and 1 of it.
        rng: Decides who is fed what.
        truth: Their tokens, `gamma` + 1 more than are fed.
        want: [length, H], what right tokens must bring.
        gamma: Drafts of a round.
        tolerance: Of the comparison.

    Returns:
        Positions modulo 8, the window, at which rounds began.
    """
    at, begun, last = [3, 20], set[int](), len(truth[0]) - 2 * gamma - 1
    fed.feed([(i, 0, truth[i][: at[i]]) for i in range(2)])
    while min(at) < last:
        live = [i for i in rng.sample(range(2), 2) if at[i] < last]
        many, kept = [], []
        for i in live:
            good = rng.choice([1, 1, 2, 3, gamma + 1])
            right = truth[i][at[i] : at[i] + good]
            wrong = [rng.randrange(4, 128) for _ in range(gamma + 1 - good)]
            many.append((i, at[i], right + wrong))
            kept.append(good)
            begun.add(at[i] % 8)
        for (i, start, _), good, got in zip(many, kept, fed.feed(many), strict=True):
            torch.testing.assert_close(got[:good], want[i][start : start + good], **tolerance)
            at[i] += good
    return begun
