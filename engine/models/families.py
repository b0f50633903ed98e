"""The one place that tells families of networks apart: what builds them, and what they keep."""

from collections.abc import Callable
from typing import Any

import torch

from engine.config import AttentionParallel
from engine.errors import ConfigError
from engine.kv.cache import PagedKV, bytes_per_block
from engine.kv.rolling import RollingState
from engine.models.config import DraftSpec, TargetSpec
from engine.models.decoder import Decoder
from engine.models.deepseek_v4 import DeepseekV4
from engine.models.deepseek_v4_draft_config import of_drafter
from engine.models.deepseek_v4_drafter import V4Drafter
from engine.models.deepseek_v4_layers import dealt_numbers, layer_shapes
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.deepseek_v4_weights import V4Weights
from engine.models.deepseek_v41_config import of_images
from engine.models.drafter import Drafter
from engine.models.interface import AnyDraft, AnyTarget, Draft, State, Target
from engine.models.layers import Placement
from engine.models.shard import check_heads

_V4_SPECS = V4TargetSpec, V4DraftSpec


def build_target(spec: AnyTarget, weights: Any, at: Placement, num_positions: int) -> Target:
    """Read a target's weights.

    Args:
        spec: Its shape.
        weights: An open checkpoint, or what stands for one: `take` and `has`.
        at: Dtype, device and ranks.
        num_positions: Positions that can be asked for.
    """
    if isinstance(spec, V4TargetSpec):
        held = V4Weights(weights, weights.has, at, spec.fp8_block, weights.folder)
        return DeepseekV4(spec, held, num_positions)
    return Decoder(spec, weights, at, num_positions)


def build_draft(
    spec: AnyDraft, weights: Any, target: Target, at: Placement, num_positions: int
) -> Draft:
    """Read a draft's weights; arguments as for a target."""
    if isinstance(spec, V4DraftSpec):
        if not isinstance(target, DeepseekV4):
            raise _strangers()
        held = V4Weights(weights, weights.has, at, spec.fp8_block)
        return V4Drafter(spec, held, target, num_positions)
    if not isinstance(target, Decoder):
        raise _strangers()
    return Drafter(spec, weights, weights.has, target, at, num_positions)


def check_family(target: AnyTarget, draft: AnyDraft) -> None:
    """Refuse a draft of another family than its target.

    Raises:
        ConfigError: They are not of one.
    """
    if isinstance(target, V4TargetSpec) != isinstance(draft, V4DraftSpec):
        raise _strangers()


def _strangers() -> ConfigError:
    return ConfigError(
        "the draft and the target are of different families of networks",
        "a DeepSeek-V4 drafter lies in its target's own checkpoint: give that as the draft, too",
    )


def belongs_elsewhere(spec: AnyTarget | AnyDraft, name: str) -> bool:
    """Is a tensor in the files of this network another network's?"""
    if isinstance(spec, V4TargetSpec):
        return of_drafter(name) or of_images(name)
    return isinstance(spec, V4DraftSpec) and (not of_drafter(name) or of_images(name))


def check_ranks(
    spec: AnyTarget | AnyDraft, size: int, whose: str, *, data_attention: bool = False
) -> None:
    """Refuse a number of ranks that a network cannot be dealt to.

    Args:
        spec: The network.
        size: Ranks.
        whose: For the message: "the target" or "the draft".
        data_attention: Do ranks share requests, not heads?

    Raises:
        ConfigError: Says which numbers of ranks would do.
    """
    if isinstance(spec, TargetSpec | DraftSpec):
        check_heads(spec.layers, size, whose)
        return
    if data_attention:
        return  # experts go to any number of ranks
    groups, heads = spec.layers.o_groups, spec.layers.num_heads
    if groups % size:
        good = [str(n) for n in range(1, groups + 1) if groups % n == 0]
        raise ConfigError(
            f"-tp {size}: {whose} has {heads} heads in {groups} output groups, which cannot be "
            f"dealt to {size} ranks",
            f"use -tp {' or '.join(good)}, or --attention-parallel data",
        )


def shares_requests(
    target: AnyTarget,
    draft: AnyDraft | None,
    asked: AttentionParallel,
    size: int,
    kept: Callable[[], int],
    itemsize: int,
) -> bool:
    """Is attention data-parallel: requests dealt to ranks, not heads?

    Args:
        target: The target.
        draft: The draft, if there is one.
        asked: As the user has it.
        size: Ranks.
        kept: Bytes that all requests together take.
        itemsize: Bytes of a number of attention's weights, at the most.

    Raises:
        ConfigError: It was asked for, and the target is not made for it.
    """
    if asked == "tensor" or (asked == "auto" and not isinstance(target, V4TargetSpec)):
        return False
    if not isinstance(target, V4TargetSpec):
        raise ConfigError(
            f"--attention-parallel data: {target.architecture} is dense, its heads are shared",
            "leave it out; several engines share requests: --data-parallel-size",
        )
    if size == 1:
        return False
    weights = sum(dealt_numbers(s.layers) for s in (target, draft) if isinstance(s, _V4_SPECS))
    # a rank more of weights against a rank less of what requests keep
    return asked == "data" or weights * itemsize < kept()


def block_size(spec: AnyTarget, asked: int) -> int:
    """Tokens of a KV block: as asked, or more where a block has to hold whole windows."""
    if isinstance(spec, V4TargetSpec):
        return max(asked, *(spec.layers.ratio(i) for i in range(spec.layers.num_layers)))
    return asked


def shares_prefixes(spec: AnyTarget) -> bool:
    """Can a request start from KV blocks that another one has computed? Not from rings."""
    return not isinstance(spec, V4TargetSpec)


def bytes_a_block(spec: AnyTarget | AnyDraft, kv_block_size: int, at: Placement) -> int:
    """Bytes that one KV block takes in one network's state."""
    size = at.dtype.itemsize
    if isinstance(spec, V4TargetSpec | V4DraftSpec):
        return sum(s.bytes_a_block(kv_block_size, size) for s in layer_shapes(spec.layers))
    layers = at.share.layers(spec.layers)
    return bytes_per_block(
        layers.num_layers, kv_block_size, layers.num_kv_heads, layers.head_dim, size
    )


def bytes_a_row(spec: AnyTarget | AnyDraft, most_queries: int, at: Placement) -> int:
    """Bytes that one request takes however short it is."""
    if isinstance(spec, V4TargetSpec | V4DraftSpec):
        size = at.dtype.itemsize
        tokens = (_lookback(spec) + most_queries) * torch.int64.itemsize if _lookback(spec) else 0
        return tokens + sum(s.bytes_a_row(most_queries, size) for s in layer_shapes(spec.layers))
    return 0


def _lookback(spec: V4TargetSpec | V4DraftSpec) -> int:
    return spec.lookback if isinstance(spec, V4TargetSpec) else 0


def allocate(
    spec: AnyTarget | AnyDraft,
    num_rows: int,
    num_blocks: int,
    kv_block_size: int,
    most_queries: int,
    at: Placement,
) -> State:
    """A network's state.

    Args:
        spec: The network.
        num_rows: Requests at once, of all ranks; one row more is made for padding.
        num_blocks: KV blocks of this rank.
        kv_block_size: Tokens of each.
        most_queries: Tokens of a request that a round may write and the next reject.
        at: Dtype, device and ranks.
    """
    kind: dict[str, Any] = {"dtype": at.dtype, "device": at.device}
    if isinstance(spec, V4TargetSpec | V4DraftSpec):
        shapes = layer_shapes(spec.layers)
        sizes = at.held(num_rows) + 1, num_blocks, kv_block_size, most_queries
        return RollingState.allocate(shapes, *sizes, lookback=_lookback(spec), **kind)
    layers = spec.layers
    heads = at.share.layers(layers).num_kv_heads
    return PagedKV.allocate(
        layers.num_layers, num_blocks, kv_block_size, heads, layers.head_dim, **kind
    )
