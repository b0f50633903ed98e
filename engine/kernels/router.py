"""Which experts a token goes to, and with what weight (DeepSeek-V4).

    s = sqrt(softplus(logits))
    experts: the top k of s + bias, of equal ones the first; or, in hashed layers, a table's row
    weight_e = s_e / (sum of the chosen s + 1e-20) * scale

The bias decides who is chosen and has no part in the weights. All in float32.
"""

import torch

from engine.kernels.contract import Dims

_TINY = 1e-20


def route(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    per_token: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts.

    Args:
        logits: [T, E] float32.
        token_ids: [T] int64.
        bias: [E] float32, where experts are chosen by score.
        table: [V, k] int64, where they are looked up.
        per_token: k.
        scale: Of the weights.

    Returns:
        Experts [T, k] int64 and their weights [T, k] float32.
    """
    dims = Dims()
    dims.check("logits", logits, "T E", torch.float32)
    dims.check("token_ids", token_ids, "T", torch.int64)
    scores = torch.nn.functional.softplus(logits).sqrt()
    if table is not None:
        experts = table[token_ids]
    else:
        assert bias is not None
        ranked = (scores + bias).sort(dim=1, descending=True, stable=True)
        experts = ranked.indices[:, :per_token]
    chosen = scores.gather(1, experts)
    return experts, chosen / (chosen.sum(dim=1, keepdim=True) + _TINY) * scale
