"""What a checkpoint is, in one convention whatever format it came in.

Hidden states are numbered h[0] = token embeddings, h[j] = residual stream after j decoder layers,
no norm applied. Every parser converts to these numbers.
"""

from dataclasses import dataclass
from typing import Literal

MarkovKind = Literal["none", "vanilla", "gated", "rnn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary embedding: half-split ("neox") pairs, absolute positions."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersSpec:
    """Shape of a stack of decoder layers, target or draft."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over head_dim on q and k before rope (Qwen3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSpec:
    """A dense decoder the engine can serve."""

    architecture: str
    layers: LayersSpec
    vocab_size: int
    """Rows of the embedding, padding included."""

    tie_embeddings: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """As stored: float32, bfloat16 or float16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSpec:
    """A DSpark drafter: G query rows a request, K/V context from the target's taps."""

    layers: LayersSpec
    vocab_size: int
    """Input vocabulary: the target's."""

    draft_vocab_size: int
    """Rows of base logits and of the Markov output; below vocab_size there is a d2t table."""

    num_speculative_tokens: int
    """G the draft was trained for."""

    sample_from_anchor: bool
    """True: row k predicts position anchor+k+1, G rows. False: row 0 predicts nothing, row k >= 1
    predicts its own position anchor+k, G+1 rows."""

    mask_token_id: int
    taps: tuple[int, ...]
    """j of the target's h[j], ascending; concatenated in this order for `fc`."""

    target_hidden_size: int
    num_target_layers: int | None
    """Depth of the target it was trained for; None when the checkpoint does not say."""

    windows: tuple[int, ...]
    """Per layer: context tokens before the anchor that are visible; 0 = all."""

    causal: tuple[bool, ...]
    """Per layer: is attention inside the draft block causal (False: bidirectional)?"""

    markov: MarkovKind
    markov_rank: int
    has_confidence: bool
    confidence_with_markov: bool
    max_position: int
    dtype: str
