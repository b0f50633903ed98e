"""What a DeepSeek-V4 checkpoint is: the target, and the drafter that it carries.

As in `engine.models.config`, h[0] is the token embeddings and h[j] the residual after j layers;
here a residual is several streams, of which a tap is the mean.
"""

from dataclasses import dataclass
from typing import Literal

LayerKind = Literal["window", "sparse", "heavy", "shared"]
"""What a layer sees beside its window: nothing; the compressed entries that an indexer chooses,
made of overlapping windows; all compressed entries, made of windows that do not overlap; or (V4.1)
those chosen by a layer at or before it, of entries made by a layer at or before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnRope:
    """Rotary embedding of adjacent pairs on the last channels of a head; nothing else is scaled."""

    theta: float
    factor: float = 1.0
    """1: plain."""

    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerSpec:
    """How a sparse layer chooses entries."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcesSpec:
    """V4.1: entries are made, and chosen, in some layers for those after them, too."""

    ratios: tuple[int, ...]
    """By layer: tokens to an entry of those it sees; 0: it sees its window alone."""

    entries: tuple[int, ...]
    """Layers that make entries and index keys; others see those of the last one before them."""

    choices: tuple[int, ...]
    """Layers with an indexer, those that make entries among them; others take over the choice of
    the last one before them."""

    candidates: int | None = None
    """The layer whose best blocks of entries are all that the indexers after it choose from."""

    candidate_blocks: int = 0
    """How many, the newest one among them."""

    candidate_block_size: int = 0
    """Entries of each."""

    def entries_of(self, layer: int) -> int:
        """The layer whose entries one sees."""
        return max(source for source in self.entries if source <= layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngramSpec:
    """V4.1: layers whose streams are fed from tables of n-grams."""

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    """Of each layer's table."""

    buckets: tuple[tuple[int, ...], ...]
    """Of each layer's table, ranges of rows: by order of n-gram, then by hash head."""

    longest: int
    """Tokens of the longest n-gram; the shortest has 2."""

    num_heads: int
    """Hashes of an n-gram."""

    width: int
    """Numbers of a row."""

    num_numbers: int
    """Tokens that read differently."""

    pad_token_id: int
    """Stands before the first token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperSpec:
    """Hyper-connections (mHC): several residual streams, mixed around every sublayer."""

    num_streams: int
    sinkhorn_iterations: int
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Mixture of experts: some routed, one shared by all tokens."""

    num_experts: int
    per_token: int
    width: int
    """Of routed and shared experts."""

    scale: float
    """Of the routed experts' normalised weights."""

    limit: float
    """Gates are cut above it, ups on both sides, before the activation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class V4Layers:
    """Shape of a stack of DeepSeek-V4 blocks, target or draft."""

    kinds: tuple[LayerKind, ...]
    """By layer."""

    hashed: tuple[bool, ...]
    """By layer: are experts looked up by token id?"""

    hidden_size: int
    num_heads: int
    head_dim: int
    """Of every head, of the one K that is also V, and of a compressed entry."""

    rope_dim: int
    """Channels, the last ones of a head, that turn."""

    q_rank: int
    o_groups: int
    o_rank: int
    """Output rank of each group of heads."""

    window: int
    """Keys seen, the query's own included."""

    sparse_ratio: int
    """Tokens to a compressed entry of a sparse layer."""

    heavy_ratio: int
    indexer: IndexerSpec
    """Of sparse and of shared layers."""

    hyper: HyperSpec
    experts: ExpertsSpec
    norm_eps: float
    window_rope: YarnRope
    """Of layers that see their window alone."""

    compressed_rope: YarnRope
    """Of all others, their window keys included."""

    delayed: bool = False
    """V4.1: streams collapse into a sublayer by what the sublayer before it has found, into the
    first one as stream 0, and at the end by what the last one has found."""

    q_head_norm: bool = True
    """RMS norm of each query head, without a weight; V4.1 has none."""

    sources: SourcesSpec | None = None
    """Of shared layers, if there are any."""

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.kinds)

    def ratio(self, layer: int) -> int:
        """Tokens to a compressed entry of a layer; 0 for none."""
        kind = self.kinds[layer]
        if kind == "shared":
            assert self.sources is not None
            return self.sources.ratios[layer]
        return {"window": 0, "sparse": self.sparse_ratio, "heavy": self.heavy_ratio}[kind]

    def rope(self, layer: int) -> YarnRope:
        """Of a layer's queries, keys and entries."""
        return self.window_rope if self.kinds[layer] == "window" else self.compressed_rope


@dataclass(frozen=True, kw_only=True, slots=True)
class V4TargetSpec:
    """A DeepSeek-V4 target."""

    architecture: str
    layers: V4Layers
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """Of activations, and of weights that are not packed."""

    tie_embeddings: bool = False
    fp8_block: int = 128
    """Rows and columns of fp8 weights that share a scale."""

    engram: EngramSpec | None = None

    @property
    def lookback(self) -> int:
        """Tokens before its own that a token's n-grams reach back to."""
        return 0 if self.engram is None else self.engram.longest - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class V4DraftSpec:
    """The drafter of a DeepSeek-V4 checkpoint: some blocks that see a window of context."""

    layers: V4Layers
    vocab_size: int
    num_speculative_tokens: int
    """G it was trained for; as many rows: the anchor's predicts the first draft."""

    mask_token_id: int
    """Stands for the drafts that are not known yet."""

    taps: tuple[int, ...]
    """j of the target's h[j], ascending."""

    num_target_layers: int
    markov_rank: int
    has_confidence: bool
    confidence_with_markov: bool
    max_position: int
    dtype: str
    fp8_block: int = 128
    """As in the target."""

    sample_from_anchor: bool = True
    markov: Literal["vanilla"] = "vanilla"

    @property
    def draft_vocab_size(self) -> int:
        """The target's."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """The same as its own: embedding and head are the target's."""
        return self.layers.hidden_size
