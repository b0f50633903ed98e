"""config.json of DeepSeek-V4 and V4.1 -> V4TargetSpec, as released and as transformers spells it.

Released configs say `compress_ratios`, a number a layer: 0 window, 4 sparse, 128 heavy; those past
`num_hidden_layers` belong to the drafter. transformers writes `layer_types` and `compress_rates`,
and `mlp_layer_types` for `num_hash_layers`. Nothing of this is guessed: checkpoints of one size
interleave layers in another way than those of the next. What V4.1 has of its own is read in
`engine.models.deepseek_v41_config`.
"""

from pathlib import Path
from typing import Any

from engine.models.config_reader import ConfigFields, read_json
from engine.models.decoder_config import architecture_of, parse_dtype, parse_eos
from engine.models.deepseek_v4_spec import (
    ExpertsSpec,
    HyperSpec,
    IndexerSpec,
    LayerKind,
    SourcesSpec,
    V4Layers,
    V4TargetSpec,
    YarnRope,
)
from engine.models.deepseek_v41_config import (
    ARCHITECTURE_V41,
    flattened,
    is_deepseek_v41,
    parse_engram,
    parse_sources,
    refuse_variants,
)

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
_HINT = "use a DeepSeek-V4 or V4.1 checkpoint"

_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}
_RATIOS: dict[int, LayerKind] = {0: "window", 4: "sparse", 128: "heavy"}
_SPARSE_RATIO, _HEAVY_RATIO = 4, 128
_FP8_BLOCKS = 128, 32
"""Rows and columns that share a scale, in V4 and in V4.1."""

# Written by released configs and by transformers; none changes what the target computes.
_INERT = """
    num_nextn_predict_layers n_mtp_layers output_router_logits router_aux_loss_coef
    router_jitter_noise aux_loss_alpha seq_aux ep_size
    dspark_block_size dspark_noise_token_id dspark_target_layer_ids dspark_markov_rank
    dspark_n_routed_experts dspark_num_experts_per_tok
    dspark_draft_topk enable_confidence_head confidence_head_with_markov sample_from_anchor
"""


def is_deepseek_v4(fields: ConfigFields) -> bool:
    """Is this the config of a DeepSeek-V4, or V4.1?"""
    if is_deepseek_v41(fields):
        return True
    named = architecture_of(fields)
    return named == ARCHITECTURE or (not named and fields.raw("model_type") == MODEL_TYPE)


def parse_deepseek_v4(folder: Path) -> V4TargetSpec:
    """What the target in a folder is.

    Args:
        folder: A DeepSeek-V4 checkpoint.

    Raises:
        CheckpointError: It is a variant that is not served, by name.
    """
    fields = read_fields(folder)
    v41 = is_deepseek_v41(fields)
    if v41:
        refuse_variants(fields)
    else:
        architecture_of(fields)
        fields.expect("model_type", MODEL_TYPE, _HINT)
    block = _fp8_block(fields)
    vocab_size = fields.integer("vocab_size")
    fields.expect("tie_word_embeddings", False, _HINT)
    spec = V4TargetSpec(
        architecture=ARCHITECTURE_V41 if v41 else ARCHITECTURE,
        layers=parse_v4_layers(fields, v41=v41),
        vocab_size=vocab_size,
        max_position=fields.integer("max_position_embeddings"),
        eos_token_ids=parse_eos(folder, fields, vocab_size),
        bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        dtype="bfloat16" if block and not _says_dtype(fields) else parse_dtype(fields, folder),
        fp8_block=block or _FP8_BLOCKS[0],
        engram=parse_engram(fields, folder) if v41 else None,
    )
    fields.finish(also_inert=_INERT.split())
    return spec


def read_fields(folder: Path) -> ConfigFields:
    """A checkpoint's config, what V4.1 nests in it brought up."""
    where = folder / "config.json"
    return ConfigFields(flattened(read_json(where), str(where)), str(where))


def _fp8_block(fields: ConfigFields) -> int | None:
    """If weights are packed, in a way that is served: rows and columns of fp8 that share a scale.

    Which tensors are packed, they say themselves.

    [ckpt] The published recipe rounds activations to fp8, too (`activation_scheme`); here they stay
    as they are, which is closer to the trained network.
    """
    fields.raw("expert_dtype")  # as the experts' tensors say
    found = fields.raw("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise fields.error("quantization_config", f"must be an object, got {found!r}")
    inner = ConfigFields(found, f"{fields.where}: quantization_config")
    inner.expect("quant_method", "fp8", _HINT)
    inner.expect("fmt", "e4m3", _HINT)
    sizes = inner.integers("weight_block_size")
    if sizes not in [(size, size) for size in _FP8_BLOCKS]:
        raise inner.error(
            "weight_block_size", f"is {list(sizes)}; blocks of {_FP8_BLOCKS} are served", _HINT
        )
    inner.finish(also_inert=("activation_scheme", "scale_fmt", "expert_dtype"))
    return sizes[0]


def _says_dtype(fields: ConfigFields) -> bool:
    return "dtype" in fields or "torch_dtype" in fields


def parse_v4_layers(fields: ConfigFields, *, v41: bool = False) -> V4Layers:
    """The target's blocks."""
    for key, plain in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("num_key_value_heads", 1),
    ):
        fields.expect(key, plain, _HINT)
    heads, groups = fields.integer("num_attention_heads"), fields.integer("o_groups")
    if heads % groups:
        raise fields.error(
            "num_attention_heads", f"must be a multiple of o_groups, got {heads} and {groups}"
        )
    head_dim = fields.integer("head_dim")
    sources: SourcesSpec | None = None
    if v41:
        (kinds, sources), sparse, heavy = parse_sources(fields), 0, 0
    else:
        kinds, sparse, heavy = _kinds(fields)
    window_rope, compressed_rope = _ropes(fields)
    return V4Layers(
        kinds=kinds,
        hashed=_hashed(fields, len(kinds), 0 if v41 else None),
        hidden_size=fields.integer("hidden_size"),
        num_heads=heads,
        head_dim=head_dim,
        rope_dim=_rope_dim(fields, head_dim),
        q_rank=fields.integer("q_lora_rank"),
        o_groups=groups,
        o_rank=fields.integer("o_lora_rank"),
        window=fields.integer("sliding_window"),
        sparse_ratio=sparse,
        heavy_ratio=heavy,
        indexer=IndexerSpec(
            num_heads=fields.integer("index_n_heads"),
            head_dim=fields.integer("index_head_dim"),
            top_k=fields.integer("index_topk"),
        ),
        hyper=HyperSpec(
            num_streams=fields.integer("hc_mult"),
            sinkhorn_iterations=fields.integer("hc_sinkhorn_iters"),
            eps=fields.number("hc_eps"),
        ),
        experts=_experts(fields),
        norm_eps=fields.number("rms_norm_eps"),
        window_rope=window_rope,
        compressed_rope=compressed_rope,
        # [ckpt] V4.1's released configs leave both out: its architecture says them
        delayed=fields.flag("hc_pre_from_prev_sublayer", v41),
        q_head_norm=fields.flag("q_head_norm", not v41),
        sources=sources,
    )


def _experts(fields: ConfigFields) -> ExpertsSpec:
    for key, plain in (
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
        ("n_shared_experts", 1),
        ("n_group", 1),
        ("topk_group", 1),
        ("first_k_dense_replace", 0),
        ("moe_layer_freq", 1),
        ("gate_temp", 1.0),
    ):
        fields.expect(key, plain, _HINT)
    found = ExpertsSpec(
        num_experts=fields.integer("n_routed_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        scale=fields.number("routed_scaling_factor"),
        limit=fields.number("swiglu_limit"),
    )
    if found.per_token > found.num_experts:
        raise fields.error(
            "num_experts_per_tok",
            f"must be at most n_routed_experts {found.num_experts}, got {found.per_token}",
        )
    return found


def _kinds(fields: ConfigFields) -> tuple[tuple[LayerKind, ...], int, int]:
    """Layers by kind, and the ratios of sparse and heavy ones."""
    depth = fields.integer("num_hidden_layers")
    ratios, types = fields.raw("compress_ratios"), fields.raw("layer_types")
    rates = fields.raw("compress_rates", {})
    if ratios is None and types is None:
        raise fields.error(
            "compress_ratios", "is missing, and so is layer_types: which layer does what?"
        )
    from_types: tuple[LayerKind, ...] = ()
    sparse, heavy = _SPARSE_RATIO, _HEAVY_RATIO
    if types is not None:
        if len(types) != depth or any(t not in _KINDS for t in types):
            raise fields.error(
                "layer_types", f"must be {depth} of {' | '.join(_KINDS)}, got {types!r}"
            )
        from_types = tuple(_KINDS[t] for t in types)
        sparse = _rate(fields, rates, "compressed_sparse_attention", sparse)
        heavy = _rate(fields, rates, "heavily_compressed_attention", heavy)
    if ratios is None:
        return from_types, sparse, heavy
    found = fields.integers("compress_ratios")
    unknown = sorted(set(found) - set(_RATIOS))
    if unknown or len(found) < depth or any(found[depth:]):
        raise fields.error(
            "compress_ratios",
            f"must be 0, 4 or 128 for each of {depth} layers and 0 for those of a drafter, "
            f"got {list(found)}",
            f"ratios 1 and 2 are V4.1's: its configs say architectures {ARCHITECTURE_V41}",
        )
    kinds = tuple(_RATIOS[r] for r in found[:depth])
    if from_types and (from_types, sparse, heavy) != (kinds, _SPARSE_RATIO, _HEAVY_RATIO):
        raise fields.error(
            "compress_ratios",
            "does not agree with layer_types and compress_rates",
            "remove the wrong one from the checkpoint's config.json",
        )
    return kinds, _SPARSE_RATIO, _HEAVY_RATIO


def _rate(fields: ConfigFields, rates: Any, kind: str, default: int) -> int:
    rate = rates.get(kind, default) if isinstance(rates, dict) else None
    if isinstance(rate, bool) or not isinstance(rate, int) or rate < 2 or rate & (rate - 1):
        raise fields.error("compress_rates", f"must name powers of two, got {rates!r}")
    return rate


def _hashed(fields: ConfigFields, depth: int, unsaid: int | None) -> tuple[bool, ...]:
    """Layers whose experts are looked up; `unsaid`: how many, where the config is silent."""
    types, count = fields.raw("mlp_layer_types"), fields.raw("num_hash_layers", unsaid)
    if types is not None:
        known = ("moe", "hash_moe")
        if not isinstance(types, list) or len(types) != depth or any(t not in known for t in types):
            raise fields.error(
                "mlp_layer_types", f"must be {depth} of {' | '.join(known)}, got {types!r}"
            )
        return tuple(t == "hash_moe" for t in types)
    if count is None:
        raise fields.error(
            "num_hash_layers", "is missing, and so is mlp_layer_types: where are experts hashed?"
        )
    count = fields.integer("num_hash_layers", unsaid or 0, minimum=0)
    return tuple(i < count for i in range(depth))


def _rope_dim(fields: ConfigFields, head_dim: int) -> int:
    """Channels that turn, from either spelling; both, if both are there, must agree."""
    share = fields.raw("partial_rotary_factor")
    named = fields.optional_integer("qk_rope_head_dim")
    if share is None and named is None:
        raise fields.error("qk_rope_head_dim", "is missing")
    width = named or int(head_dim * fields.number("partial_rotary_factor"))
    if share is not None and width != int(head_dim * share):
        raise fields.error(
            "qk_rope_head_dim", f"is {width} but partial_rotary_factor {share} of {head_dim} is not"
        )
    if width % 2 or not 0 < width <= head_dim:
        raise fields.error("qk_rope_head_dim", f"must be even, at most {head_dim}, got {width}")
    return width


def _ropes(fields: ConfigFields) -> tuple[YarnRope, YarnRope]:
    """Of window layers, always plain, and of compressed ones; both spellings have to agree."""
    theta = fields.number("rope_theta", 10000.0)
    compressed = fields.number("compress_rope_theta", 160000.0)
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        given = fields.raw(key)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise fields.error(key, f"must be an object, got {given!r}")
        nested = isinstance(given.get("main"), dict) and isinstance(given.get("compress"), dict)
        main, other = (given["main"], given["compress"]) if nested else ({}, given)
        pair = _rope(fields, f"{key}.main", main, theta), _rope(fields, key, other, compressed)
        found.append(pair)
    if len(found) > 1 and found[0] != found[1]:
        raise fields.error(
            "rope_scaling",
            "does not agree with rope_parameters",
            "remove the wrong one from the checkpoint's config.json",
        )
    return found[0] if found else (YarnRope(theta=theta), YarnRope(theta=compressed))


def _rope(fields: ConfigFields, key: str, value: dict[str, Any], theta: float) -> YarnRope:
    rope = ConfigFields(value, f"{fields.where}: {key}")
    kind = rope.text("rope_type", rope.raw("type", "default"))
    theta = rope.number("rope_theta", theta)
    rope.raw("partial_rotary_factor")
    # cosines and sines are not scaled, whatever YaRN does elsewhere
    rope.expect("attention_factor", 1.0, _HINT)
    if kind == "default":
        rope.finish(also_inert=("original_max_position_embeddings",))
        return YarnRope(theta=theta)
    if kind != "yarn":
        raise fields.error(key, f"asks for rope type {kind!r}; known are default and yarn", _HINT)
    found = YarnRope(
        theta=theta,
        factor=rope.number("factor"),
        original_max_position=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )
    rope.finish(also_inert=("mscale", "mscale_all_dim"))
    return found
