"""The drafter in a DeepSeek-V4 checkpoint -> V4DraftSpec: `dspark_*` keys and `mtp.k.*` tensors.

How many stages there are is counted in the tensors' names: `num_nextn_predict_layers` says
something else. A checkpoint with the older prediction layer has `mtp.0.e_proj` where a drafter has
`mtp.0.main_proj`, and is told apart by that.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from engine.errors import CheckpointError
from engine.models.config_reader import ConfigFields
from engine.models.decoder_config import check_token_id
from engine.models.deepseek_v4_config import parse_deepseek_v4, read_fields
from engine.models.deepseek_v4_spec import ExpertsSpec, LayerKind, V4DraftSpec
from engine.models.headers import read_headers

_STAGE = re.compile(r"(?:model\.)?mtp\.(\d+)\.(.*)")


def of_drafter(name: str) -> bool:
    """Is this tensor the drafter's rather than the target's?"""
    return _STAGE.match(name) is not None


def parse_deepseek_v4_draft(folder: Path) -> V4DraftSpec:
    """What the drafter in a folder is.

    Args:
        folder: A DeepSeek-V4 checkpoint.

    Raises:
        CheckpointError: It has none, or one that is not served.
    """
    target = parse_deepseek_v4(folder)
    fields = read_fields(folder)
    stages, leaves = _stages(folder, read_headers(folder))
    window: LayerKind = "window"
    last = stages - 1
    depth = target.layers.num_layers
    ids = fields.integers("dspark_target_layer_ids")
    if list(ids) != sorted(set(ids)) or ids[-1] >= depth:
        raise fields.error(
            "dspark_target_layer_ids",
            f"must ascend and stay below num_hidden_layers={depth}, got {list(ids)}",
        )
    fields.expect("sample_from_anchor", True, "use a drafter whose anchor row predicts")
    mask = fields.integer("dspark_noise_token_id", minimum=0)
    wanted = fields.flag("enable_confidence_head", True)
    return V4DraftSpec(
        layers=replace(
            target.layers,
            kinds=(window,) * stages,
            hashed=(False,) * stages,
            sources=None,
            experts=_experts(fields, target.layers.experts),
        ),
        vocab_size=target.vocab_size,
        num_speculative_tokens=fields.integer("dspark_block_size"),
        mask_token_id=check_token_id(fields, "dspark_noise_token_id", mask, target.vocab_size),
        # [ckpt] a tap is taken after the layer of that number, in V4.1 before it; a shift by one
        # would not fail, it would only lower acceptance
        taps=ids if target.layers.delayed else tuple(k + 1 for k in ids),
        num_target_layers=depth,
        markov_rank=fields.integer("dspark_markov_rank"),
        # [ckpt] checkpoints may leave the head out although their config asks for it
        has_confidence=wanted and f"{last}.confidence_head.proj.weight" in leaves,
        confidence_with_markov=fields.flag("confidence_head_with_markov", True),
        max_position=target.max_position,
        dtype=target.dtype,
        fp8_block=target.fp8_block,
    )


def _experts(fields: ConfigFields, target: ExpertsSpec) -> ExpertsSpec:
    """The target's, but for what V4.1 says of its drafter."""
    count = fields.integer("dspark_n_routed_experts", target.num_experts)
    per_token = fields.integer("dspark_num_experts_per_tok", target.per_token)
    if per_token > count:
        raise fields.error(
            "dspark_num_experts_per_tok",
            f"must be at most the draft's {count} experts, got {per_token}",
        )
    return replace(target, num_experts=count, per_token=per_token)


def _stages(folder: Path, names: Iterable[str]) -> tuple[int, frozenset[str]]:
    """Stages, and their tensors' names after `mtp.`."""
    found = [match for match in map(_STAGE.match, names) if match is not None]
    numbers = {int(match[1]) for match in found}
    leaves = frozenset(f"{match[1]}.{match[2]}" for match in found)
    if "0.main_proj.weight" not in leaves:
        old = "; mtp.0.e_proj is the older prediction layer" * any("e_proj" in n for n in leaves)
        raise CheckpointError(
            f"{folder} has no DSpark drafter: there is no tensor mtp.0.main_proj.weight{old}",
            "use a DeepSeek-V4 checkpoint that carries one, or drop --draft",
        )
    if numbers != set(range(len(numbers))):
        raise CheckpointError(
            f"{folder}: drafter stages {sorted(numbers)} are not numbered from 0 up",
            "download the checkpoint again",
        )
    return len(numbers), leaves
