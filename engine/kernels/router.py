"""Which experts a token goes to, and with what weight (DeepSeek-V4).

    s = sqrt(softplus(logits))
    experts: the top k of s + bias, of equal ones the first; or, in hashed layers, a table's row
    weight_e = s_e / (sum of the chosen s + 1e-20) * scale

The bias decides who is chosen and has no part in the weights. All in float32.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

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
    impl = route_triton if logits.is_cuda else route_ref
    return impl(logits, token_ids, bias=bias, table=table, per_token=per_token, scale=scale)


def route_ref(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    per_token: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` in torch: the definition the kernel is held to."""
    scores = torch.nn.functional.softplus(logits).sqrt()
    if table is not None:
        experts = table[token_ids]
    else:
        assert bias is not None
        ranked = (scores + bias).sort(dim=1, descending=True, stable=True)
        experts = ranked.indices[:, :per_token]
    chosen = scores.gather(1, experts)
    return experts, chosen / (chosen.sum(dim=1, keepdim=True) + _TINY) * scale


def route_triton(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    per_token: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` as one launch, a program a token."""
    num_tokens, count = logits.shape
    experts = torch.empty((num_tokens, per_token), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, per_token), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            experts,
            weights,
            logits.contiguous(),
            token_ids,
            logits if bias is None else bias,
            token_ids if table is None else table,
            scale,
            E=count,
            PER_TOKEN=per_token,
            HASHED=table is not None,
            BLOCK=triton.next_power_of_2(count),
            SLOTS=triton.next_power_of_2(per_token),
            num_warps=1,
            **dependent(logits),
        )
    return experts, weights


@triton.jit
def _scores(logits):
    """sqrt(softplus), accurate where exp is small against 1."""
    exp = tl.exp(tl.minimum(logits, 20.0))
    one_more = 1.0 + exp
    rest = tl.where(one_more == 1.0, 1.0, one_more - 1.0)
    soft = tl.where(one_more == 1.0, exp, tl.log(one_more) * (exp / rest))
    return tl.sqrt(tl.where(logits > 20.0, logits, soft))


@triton.jit(do_not_specialize=["scale"])
def _route_kernel(
    experts_ptr,  # [T, PER_TOKEN] int64, out
    weights_ptr,  # [T, PER_TOKEN], out
    logits_ptr,  # [T, E]
    ids_ptr,  # [T] int64
    bias_ptr,  # [E], unless HASHED
    table_ptr,  # [V, PER_TOKEN] int64, if HASHED
    scale,
    E: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HASHED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK)
    live = each < E
    scores = _scores(tl.load(logits_ptr + token * E + each, mask=live, other=0.0))
    ranked = scores
    if HASHED:
        row = tl.load(ids_ptr + token) * PER_TOKEN
    else:
        ranked += tl.load(bias_ptr + each, mask=live, other=0.0)
        ranked = tl.where(live, ranked, float("-inf"))
    slot = tl.arange(0, SLOTS)
    kept = tl.zeros([SLOTS], dtype=tl.float32)
    total = 0.0
    for j in tl.static_range(PER_TOKEN):
        if HASHED:
            chosen = tl.load(table_ptr + row + j)
        else:
            chosen = tl.argmax(ranked, 0, tie_break_left=True).to(tl.int64)
            ranked = tl.where(each == chosen, float("-inf"), ranked)
        score = tl.sum(tl.where(each == chosen, scores, 0.0))
        total += score
        kept = tl.where(slot == j, score, kept)
        tl.store(experts_ptr + token * PER_TOKEN + j, chosen)
    kept = kept / (total + 1e-20) * scale
    tl.store(weights_ptr + token * PER_TOKEN + slot, kept, mask=slot < PER_TOKEN)
