"""Hyper-connections (mHC): how a token's streams are read, written and mixed around a sublayer.

    m = (fn x) / sqrt(mean(x^2) + norm_eps)          x: the S streams side by side, in float32
    pre  = sigmoid(m_a s_0 + b_a) + eps              [S]: into the sublayer
    post = 2 sigmoid(m_b s_1 + b_b)                  [S]: out of it
    comb = Sinkhorn(softmax(m_c s_2 + b_c) + eps)    [S, S]: old stream by new stream

Sinkhorn divides columns by (sum + eps) first, then rows and columns `iterations - 1` times, so that
`comb` is nearly doubly stochastic; it is not symmetric.
"""

from dataclasses import dataclass

import torch

from engine.kernels.contract import Dims
from engine.kernels.hc_mix_triton import mix_coefficients, mix_partials


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Of one sublayer, or with S outputs (`pre` alone) of the end of a network; all float32."""

    fn: torch.Tensor  # [S * (S + 2), S * H], or [S, S * H]
    base: torch.Tensor  # [S * (S + 2)], or [S]
    scale: torch.Tensor  # [3], or [1]


def hc_mix(
    x: torch.Tensor, weights: MixWeights, *, norm_eps: float, eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients of a sublayer.

    Args:
        x: [T, S, H], float32, bfloat16 or float16.
        weights: The sublayer's.
        norm_eps: Added to the mean square.
        eps: Added to `pre`, to the softmax and to sums.
        iterations: Of Sinkhorn's.

    Returns:
        pre [T, S], post [T, S] and comb [T, S, S], float32.
    """
    dims = Dims()
    dims.check("x", x, "T S H")
    impl = hc_mix_triton if x.is_cuda else hc_mix_ref
    return impl(x, weights, norm_eps=norm_eps, eps=eps, iterations=iterations)


def hc_mix_ref(
    x: torch.Tensor, weights: MixWeights, *, norm_eps: float, eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hc_mix` in torch: the definition a kernel is held to."""
    streams = x.shape[1]
    m, scale, base = _project(x, weights.fn, norm_eps), weights.scale, weights.base
    cut = (streams, streams, streams * streams)
    pre, post, comb = m.split(cut, dim=1)
    base_pre, base_post, base_comb = base.split(cut)
    pre = torch.sigmoid(pre * scale[0] + base_pre) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    square = (comb * scale[2] + base_comb).view(-1, streams, streams).softmax(dim=-1) + eps
    square = square / (square.sum(dim=1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        square = square / (square.sum(dim=2, keepdim=True) + eps)
        square = square / (square.sum(dim=1, keepdim=True) + eps)
    return pre, post, square


def hc_mix_triton(
    x: torch.Tensor, weights: MixWeights, *, norm_eps: float, eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hc_mix` as two launches."""
    num_tokens, streams, _ = x.shape
    if not num_tokens:
        return hc_mix_ref(x, weights, norm_eps=norm_eps, eps=eps, iterations=iterations)
    return mix_coefficients(
        mix_partials(x, weights.fn),
        weights,
        streams,
        x[0].numel(),
        norm_eps=norm_eps,
        eps=eps,
        iterations=iterations,
        head=False,
    )


def hc_head(x: torch.Tensor, weights: MixWeights, *, norm_eps: float, eps: float) -> torch.Tensor:
    """How streams collapse at the end of a network.

    Args:
        x: [T, S, H].
        weights: The network's, with S outputs.
        norm_eps: Added to the mean square.
        eps: Added to the result.

    Returns:
        pre [T, S] float32.
    """
    dims = Dims()
    dims.check("x", x, "T S H")
    impl = hc_head_triton if x.is_cuda else hc_head_ref
    return impl(x, weights, norm_eps=norm_eps, eps=eps)


def hc_head_ref(
    x: torch.Tensor, weights: MixWeights, *, norm_eps: float, eps: float
) -> torch.Tensor:
    """`hc_head` in torch: the definition a kernel is held to."""
    m = _project(x, weights.fn, norm_eps)
    return torch.sigmoid(m * weights.scale + weights.base) + eps


def hc_head_triton(
    x: torch.Tensor, weights: MixWeights, *, norm_eps: float, eps: float
) -> torch.Tensor:
    """`hc_head` as two launches."""
    if not len(x):
        return hc_head_ref(x, weights, norm_eps=norm_eps, eps=eps)
    how = {"norm_eps": norm_eps, "eps": eps}
    partials, width = mix_partials(x, weights.fn), x[0].numel()
    found = mix_coefficients(partials, weights, x.shape[1], width, **how, iterations=1, head=True)
    return found[0]


def _project(x: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """Fn of the normed streams: the norm is one number a token, applied after the product."""
    wide = x.flatten(1).float()
    scale = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + norm_eps)
    return torch.nn.functional.linear(wide, fn) * scale
