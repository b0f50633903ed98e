"""The least that a round of DeepSeek-V4 reads: its weights, and of experts those that have tokens.

M rows that choose k of E experts each at random touch E (1 - (1 - k/E)^M) of them. Keys, entries
and activations come on top and are left out: a floor is what no round can be below.
"""

import torch

from engine.kernels.experts import ExpertMatrices
from engine.kernels.linear import Linear
from engine.kernels.packed_layout import Laid
from engine.kernels.packed_linear import PackedGroups, PackedLinear
from engine.kernels.wide_linear import WideLinear
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_drafter import V4Drafter
from engine.models.deepseek_v4_layers import V4Block
from engine.models.deepseek_v4_weights import Grouped, Groups, Matrix
from engine.models.deepseek_v41_layers import SharedEntries


def round_bytes(
    target: DeepseekV4, draft: V4Drafter | None, num_reqs: int, width: int, gamma: int
) -> float:
    """Bytes that a round reads of this rank's weights.

    Args:
        target: The target.
        draft: Its drafter; None, or a width of 1, for a plain step.
        num_reqs: Requests.
        width: Tokens of each that the target sees.
        gamma: Drafts of each.
    """
    rows = num_reqs * width
    found = sum(block_bytes(layer, rows) for layer in target.layers) + _matrix(target.lm_head)
    found += sum(_matrix(engram.kv) for engram in target.engrams.values())
    if draft is None or width == 1:
        return found
    found += sum(block_bytes(layer, num_reqs * gamma) for layer in draft.layers)
    found += _matrix(draft.lm_head) + _matrix(draft.fc) + _matrix(draft.context_kv)
    w2 = draft.markov.w2
    return found + (0 if w2 is None else gamma * _matrix(w2))


def block_bytes(block: V4Block, rows: int) -> float:
    """Of one layer."""
    attention, experts = block.attention, block.experts
    matrices: list[Matrix | Grouped | WideLinear] = [attention.low, attention.q, attention.o]
    matrices += [attention.o_low, experts.gate, experts.shared_in, experts.shared_out]
    if attention.compressor is not None:
        matrices.append(attention.compressor.pairs)
    if attention.indexer is not None:
        index = attention.indexer
        matrices += [index.q, index.weigh, index.compressor.pairs]
    if attention.shared is not None:
        matrices += _of_shared(attention.shared)
    mixes = block.attention_mix.fn.nbytes + block.experts_mix.fn.nbytes
    touched = 1.0 - (1.0 - experts.spec.per_token / experts.spec.num_experts) ** rows
    routed = _experts(experts.gate_up) + _experts(experts.down)
    return sum(map(_matrix, matrices)) + mixes + touched * routed


def _of_shared(shared: SharedEntries) -> list[Matrix | WideLinear]:
    """What a layer of V4.1 reads to make entries and to choose among them."""
    found: list[Matrix | WideLinear | None] = []
    if shared.compressor is not None and shared.keys is not None:
        found += [shared.compressor.pairs, shared.compressor.values, shared.keys.matrix]
    if shared.indexer is not None:
        found += [shared.indexer.q, shared.indexer.weigh]
    return [matrix for matrix in found if matrix is not None]


def _matrix(matrix: Matrix | Grouped | WideLinear) -> int:
    if isinstance(matrix, Linear | WideLinear):
        return matrix.out_features * matrix.in_features * matrix.weight.element_size()
    if isinstance(matrix, PackedLinear):
        return _bytes(matrix.packed)
    if isinstance(matrix, Groups):
        return matrix.weight.nbytes
    if isinstance(matrix, PackedGroups) and matrix.laid is not None:
        return _bytes(matrix.laid)
    return sum(map(_matrix, matrix.each))


def _experts(matrices: ExpertMatrices) -> int:
    return _bytes(matrices.weight)


def _bytes(weight: torch.Tensor | Laid) -> int:
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return weight.weight.nbytes + weight.scale.nbytes
