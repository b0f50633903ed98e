"""Shapes of well-known models with random weights, for benchmarks: `--model shape:qwen3-8b`."""

import hashlib

import torch

from engine.errors import ConfigError
from engine.models.config import DraftSpec, LayersSpec, RopeSpec, TargetSpec
from engine.models.deepseek_v4_shapes import V4_TARGETS, RandomV4, v4_draft
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.shard import Part

PREFIX = "shape:"
_DRAFT_LAYERS, _DRAFT_RANK, _GAMMA = 5, 256, 7


def _qwen3(layers: int, hidden: int, inter: int, heads: int, tied: bool = False) -> TargetSpec:
    return TargetSpec(
        architecture="Qwen3ForCausalLM",
        layers=LayersSpec(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=inter,
            num_heads=heads,
            num_kv_heads=8,
            head_dim=128,
            norm_eps=1e-6,
            rope=RopeSpec(theta=1e6),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=True,
        ),
        vocab_size=151936,
        tie_embeddings=tied,
        max_position=40960,
        eos_token_ids=(151645,),
        bos_token_id=None,
        dtype="bfloat16",
    )


def _llama_8b() -> TargetSpec:
    return TargetSpec(
        architecture="LlamaForCausalLM",
        layers=LayersSpec(
            num_layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            norm_eps=1e-5,
            rope=RopeSpec(theta=500000.0, kind="llama3", factor=8.0),
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
        ),
        vocab_size=128256,
        tie_embeddings=False,
        max_position=131072,
        eos_token_ids=(128009,),
        bos_token_id=128000,
        dtype="bfloat16",
    )


_TARGETS = {
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
    "llama-8b": _llama_8b(),
}


def is_shape(name: str | None) -> bool:
    """Does the name ask for random weights?"""
    return name is not None and name.startswith(PREFIX)


def target_shape(name: str) -> TargetSpec | V4TargetSpec:
    """The target of that shape.

    Raises:
        ConfigError: There is none of that name.
    """
    own = name.removeprefix(PREFIX)
    spec = _TARGETS.get(own) or V4_TARGETS.get(own)
    if spec is None:
        known = ", ".join(PREFIX + n for n in (*_TARGETS, *V4_TARGETS))
        raise ConfigError(f"there is no {name}", hint=f"use one of {known}")
    return spec


def draft_shape(name: str) -> DraftSpec | V4DraftSpec:
    """The drafter that goes with a target's shape: 5 layers, gamma 7 and rank 256, or its own."""
    target = target_shape(name)
    if isinstance(target, V4TargetSpec):
        return v4_draft(target)
    shape, depth = target.layers, target.layers.num_layers
    layers = LayersSpec(
        num_layers=_DRAFT_LAYERS,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_eps=shape.norm_eps,
        rope=shape.rope,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
    )
    return DraftSpec(
        layers=layers,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        num_speculative_tokens=_GAMMA,
        sample_from_anchor=True,
        mask_token_id=target.vocab_size - 1,
        taps=tuple(2 + round(i * (depth - 4) / 4) for i in range(5)),
        target_hidden_size=shape.hidden_size,
        num_target_layers=depth,
        windows=(0,) * _DRAFT_LAYERS,
        causal=(False,) * _DRAFT_LAYERS,
        markov="vanilla",
        markov_rank=_DRAFT_RANK,
        has_confidence=True,
        confidence_with_markov=True,
        max_position=target.max_position,
        dtype=target.dtype,
    )


def random_weights(
    spec: TargetSpec | DraftSpec | V4TargetSpec | V4DraftSpec, seed: int
) -> "RandomWeights | RandomV4":
    """Made-up weights of a network; a draft has no embedding and no head of its own."""
    if isinstance(spec, V4TargetSpec | V4DraftSpec):
        return RandomV4(seed, spec.fp8_block)
    absent = ("embed_tokens.weight", "lm_head.weight") if isinstance(spec, DraftSpec) else ()
    return RandomWeights(seed, frozenset(absent))


class RandomWeights:
    """Weights made on the device as they are asked for; norms are 1.

    A tensor is named by seed and name alone: whatever was asked for before, and whatever part of it
    a rank holds, it is the same matrix.

    Args:
        seed: The same seed gives the same weights on the same kind of device.
        absent: Tensors the checkpoint does not have, e.g. a draft's own embedding.
    """

    def __init__(self, seed: int, absent: frozenset[str] = frozenset()) -> None:
        self._seed = seed
        self._absent = absent

    def has(self, name: str) -> bool:
        """Is there a tensor of this name?"""
        return name not in self._absent

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        part: Part | None = None,
    ) -> torch.Tensor:
        """A tensor: random with the spread of a trained one, so that activations stay finite."""
        if "norm" in name:
            return torch.ones(shape, dtype=dtype, device=device)
        if device.type == "meta":
            held = shape if part is None else part.of(shape)
            return torch.empty(held, dtype=dtype, device=device)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        whole = torch.empty(shape, dtype=dtype, device=device)
        whole.normal_(0.0, shape[-1] ** -0.5, generator=generator)
        return whole if part is None else part.cut(whole).clone()
