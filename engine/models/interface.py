"""What the engine asks of networks, whatever they are made of."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.kernels.linear import Linear
from engine.kernels.markov import Chain, MarkovWeights
from engine.kernels.paged_attention import AttentionBatch
from engine.kernels.sampling import SamplingRows
from engine.models.config import DraftSpec, TargetSpec
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.layers import Embedding

AnyTarget = TargetSpec | V4TargetSpec
AnyDraft = DraftSpec | V4DraftSpec


class State(Protocol):
    """What a network keeps of requests: by KV block, by row, or both."""

    @property
    def kv_block_size(self) -> int:
        """Tokens of a KV block."""


class Layer(Protocol):
    """One layer of many."""

    @property
    def products(self) -> tuple[Linear, ...]:
        """Its matrix products, in order."""


class Target(Protocol):
    """A target network; see `engine.models.decoder.Decoder`."""

    embedding: Embedding
    lm_head: Linear

    @property
    def spec(self) -> AnyTarget:
        """Its shape."""

    @property
    def layers(self) -> Sequence[Layer]:
        """In order."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        kv: Any,
        taps: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a ragged batch: hidden states [T, H] for `logits`, and taps side by side."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the vocabulary."""


class Draft(Protocol):
    """A draft network; see `engine.models.drafter.Drafter`."""

    lm_head: Linear
    markov: MarkovWeights
    num_logits: int
    draft_to_target: torch.Tensor | None

    @property
    def spec(self) -> AnyDraft:
        """Its shape."""

    @property
    def layers(self) -> Sequence[Layer]:
        """In order."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionBatch,
        kv: Any,
    ) -> torch.Tensor:
        """Run the draft blocks: hidden states [T, H]."""

    def store_context(
        self,
        taps: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Any,
        batch: AttentionBatch,
    ) -> None:
        """Turn committed tokens into draft context."""

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of the draft vocabulary."""

    def chain(
        self,
        base: torch.Tensor,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        params: SamplingRows,
        positions: torch.Tensor,
        *,
        sampled: bool,
    ) -> Chain:
        """The Markov chain."""

    def confidence(self, hidden: torch.Tensor, chain: Chain) -> torch.Tensor | None:
        """Logits [R, G] float32 of P(draft k accepted | those before it); None without a head."""
