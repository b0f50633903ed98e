"""Token ids and positions of a step in which every request continues from its anchor.

    request r, j in [0, lens[r]):
        id = anchor if j == 0 else following[r, j-1],  position = start + j

The draft pass follows the anchor with mask tokens, verification with the drafts.
"""

from typing import NamedTuple

import torch

from engine.kernels.contract import Dims


class StepInputs(NamedTuple):
    """One ragged step. R requests, T tokens."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    cu_seqlens_q: torch.Tensor  # [R+1] int32


def step_inputs(
    anchors: torch.Tensor,
    following: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    num_tokens: int,
) -> StepInputs:
    """Lay out the step.

    Args:
        anchors: [R] int64.
        following: [R, F] int64, tokens after the anchor; F >= max(lens) - 1.
        starts: [R] int64, the anchor's position.
        lens: [R] int32 >= 1, tokens per request.
        num_tokens: T = sum(lens), known to the host.
    """
    dims = Dims()
    dims.check("anchors", anchors, "R", torch.int64)
    dims.check("following", following, "R F", torch.int64)
    dims.check("starts", starts, "R", torch.int64)
    dims.check("lens", lens, "R", torch.int32)
    return step_inputs_ref(anchors, following, starts, lens, num_tokens)


def step_inputs_ref(
    anchors: torch.Tensor,
    following: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    num_tokens: int,
) -> StepInputs:
    """`step_inputs` in torch: the definition a kernel is held to."""
    cu = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    request = torch.arange(lens.numel(), device=lens.device).repeat_interleave(
        lens, output_size=num_tokens
    )
    offset = torch.arange(num_tokens, device=lens.device) - cu[request].long()
    table = torch.cat((anchors[:, None], following), dim=1)
    return StepInputs(table[request, offset], starts[request] + offset, cu)
