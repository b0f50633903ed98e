"""What config.json of DeepSeek-V4.1 says beyond V4's: text and images apart, layers with sources.

    compress_ratios            by layer, tokens to an entry of those it sees: 0, 1 or 2
    kv_source_layer_ids        layers that make entries; others see those of the last one before
    index_source_layer_ids     layers that choose entries; others take over the last choice
    candidate_source_layer_id  the layer whose best blocks the indexers after it choose from

A ratio does not mean that the layer makes entries: V4.1 has fewer sources than layers that see any.
"""

import re
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.models.config_reader import ConfigFields
from engine.models.decoder_config import check_token_id
from engine.models.deepseek_v4_spec import EngramSpec, LayerKind, SourcesSpec
from engine.models.deepseek_v41_hashes import bucket_sizes

ARCHITECTURE_V41 = "DeepseekV41ForCausalLM"
_MODEL_TYPES = "deepseek_v41", "deepseek_v41_text"
_RATIOS = 0, 1, 2
_SOURCES = "kv_source_layer_ids", "index_source_layer_ids"
_ENGRAM = (
    *("num_embeddings", "max_ngram_size", "vocab_size", "n_heads", "head_dim"),
    *("pad_token_id", "compressed_vocab_size"),
)
_CANDIDATES = "candidate_source_layer_id"
_CANDIDATE_SIZES = "candidate_topk_blocks", "candidate_block_size"

# Of the network that reads images, and what libraries write about themselves, on both levels.
_IMAGES = "vision_config", "image_token_id"
_BOTH = "model_type", "architectures", "dtype", "torch_dtype", "transformers_version"

# [ckpt] tensors of images, and the bias that chooses experts for their tokens: text has neither
_IMAGE_TENSORS = re.compile(
    r"(?:model\.)?(?:(?:vision|aligner)\..*|image_(?:start|end|newline)|.*\.ffn\.gate\.bias_vl)"
)


def of_images(name: str) -> bool:
    """Does text do without this tensor?"""
    return _IMAGE_TENSORS.fullmatch(name) is not None


def is_deepseek_v41(fields: ConfigFields) -> bool:
    """Is this the config of a DeepSeek-V4.1?"""
    named = fields.raw("architectures")
    if isinstance(named, list) and len(named) == 1 and named[0]:
        return bool(named[0] == ARCHITECTURE_V41)
    return fields.raw("model_type") in _MODEL_TYPES


def flattened(values: dict[str, Any], where: str) -> dict[str, Any]:
    """A config with what it says of text on one level, and nothing of images.

    Args:
        values: config.json.
        where: Its path.

    Raises:
        CheckpointError: Its two levels contradict each other.
    """
    text = values.get("text_config")
    if not isinstance(text, dict):
        return values
    outer = {k: v for k, v in values.items() if k not in ("text_config", *_IMAGES)}
    for key in sorted(outer.keys() & text.keys() - set(_BOTH)):
        if None not in (outer[key], text[key]) and outer[key] != text[key]:
            raise CheckpointError(
                f"{where}: {key} is {outer[key]!r}, in text_config it is {text[key]!r}",
                "remove the wrong one from the checkpoint's config.json",
            )
    said = {k: v for k, v in text.items() if v is not None}
    return outer | said | {k: outer[k] for k in _BOTH[:2] if k in outer}


def refuse_variants(fields: ConfigFields) -> None:
    """Refuse what calls itself otherwise.

    Raises:
        CheckpointError: Names the key.
    """
    named = fields.raw("model_type", _MODEL_TYPES[0])
    if named not in _MODEL_TYPES:
        raise fields.error("model_type", f"is {named!r} but architectures is {[ARCHITECTURE_V41]}")


def parse_engram(fields: ConfigFields, folder: Path) -> EngramSpec | None:
    """Layers that are fed from tables of n-grams, if there are any.

    Args:
        fields: The config, on one level.
        folder: The checkpoint, whose tokenizer says which tokens read alike.

    Raises:
        CheckpointError: Something is missing, or tables are not as large as their hashes reach.
    """
    depth = fields.integer("num_hidden_layers")
    if not fields.raw("engram_layer_ids"):
        for key in _ENGRAM:
            fields.raw(f"engram_{key}")
        return None
    layers = fields.integers("engram_layer_ids")
    if list(layers) != sorted(set(layers)) or layers[-1] >= depth:
        raise fields.error(
            "engram_layer_ids",
            f"must ascend and stay below num_hidden_layers={depth}, got {list(layers)}",
        )
    rows = fields.integers("engram_num_embeddings", minimum=1)
    longest = fields.integer("engram_max_ngram_size", minimum=2)
    heads = fields.integer("engram_n_heads")
    start = fields.integer("engram_vocab_size")
    buckets = bucket_sizes(len(layers), longest - 1, heads, start)
    reach = [sum(sizes) for sizes in buckets]
    if list(rows) != reach:
        raise fields.error(
            "engram_num_embeddings", f"is {list(rows)}, but hashes reach {reach} rows"
        )
    pad = fields.integer("engram_pad_token_id", minimum=0)
    check_token_id(fields, "engram_pad_token_id", pad, fields.integer("vocab_size"))
    if not (folder / "tokenizer.json").exists():
        raise fields.error(
            "engram_layer_ids",
            f"is {list(layers)}, and what their tables hold depends on tokenizer.json, which is "
            "not there",
            "copy the tokenizer files of the checkpoint into the folder",
        )
    return EngramSpec(
        layers=layers,
        rows=rows,
        buckets=tuple(buckets),
        longest=longest,
        num_heads=heads,
        width=fields.integer("engram_head_dim"),
        num_numbers=fields.integer("engram_compressed_vocab_size"),
        pad_token_id=pad,
    )


def parse_sources(fields: ConfigFields) -> tuple[tuple[LayerKind, ...], SourcesSpec | None]:
    """Layers by kind, and who makes and who chooses what they see.

    Args:
        fields: The config, on one level.

    Raises:
        CheckpointError: Something is missing, or a layer would see what is not there.
    """
    fields.raw("image_token_id")
    depth = fields.integer("num_hidden_layers")
    found = fields.integers("compress_ratios")
    if set(found) - set(_RATIOS) or len(found) < depth or any(found[depth:]):
        raise fields.error(
            "compress_ratios",
            f"must be 0, 1 or 2 for each of {depth} layers and 0 for those of a drafter, "
            f"got {list(found)}",
            "ratios 4 and 128 are V4's: its configs say architectures DeepseekV4ForCausalLM",
        )
    ratios = found[:depth]
    kinds: tuple[LayerKind, ...] = tuple("shared" if r else "window" for r in ratios)
    if not any(ratios):
        for key in (*_SOURCES, _CANDIDATES, *_CANDIDATE_SIZES):
            fields.raw(key)
        return kinds, None
    entries, choices = (_layers(fields, key, ratios) for key in _SOURCES)
    if not set(entries) <= set(choices):
        raise fields.error(
            "index_source_layer_ids",
            f"must have all of kv_source_layer_ids {list(entries)}, got {list(choices)}: "
            "a choice among other entries means nothing",
        )
    for layer, ratio in enumerate(ratios):
        source = max((s for s in entries if s <= layer), default=None)
        if ratio and (source is None or ratios[source] != ratio):
            seen = "none" if source is None else f"layer {source}, of {ratios[source]} tokens each"
            raise fields.error(
                "kv_source_layer_ids",
                f"{list(entries)}: layer {layer} sees entries of {ratio} tokens, and the last to "
                f"make any before it is {seen}",
            )
    return kinds, SourcesSpec(
        ratios=ratios, entries=entries, choices=choices, **_candidates(fields, entries, choices)
    )


def _layers(fields: ConfigFields, key: str, ratios: tuple[int, ...]) -> tuple[int, ...]:
    """Layers, ascending, that see entries."""
    found = fields.integers(key)
    if list(found) != sorted(set(found)) or found[-1] >= len(ratios):
        raise fields.error(
            key, f"must ascend and stay below num_hidden_layers={len(ratios)}, got {list(found)}"
        )
    blind = [layer for layer in found if not ratios[layer]]
    if blind:
        raise fields.error(key, f"names layers {blind}, whose compress_ratios are 0")
    return found


def _candidates(
    fields: ConfigFields, entries: tuple[int, ...], choices: tuple[int, ...]
) -> dict[str, Any]:
    """The two levels of a choice, if it has two."""
    key, layer = _CANDIDATES, fields.raw(_CANDIDATES, -1)
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise fields.error(key, f"must be a layer, or -1 for none, got {layer!r}")
    if layer < 0:
        for each in _CANDIDATE_SIZES:
            fields.raw(each)
        return {}
    if layer not in choices:
        raise fields.error(key, f"must be in index_source_layer_ids {list(choices)}, got {layer}")
    if layer < entries[-1]:
        raise fields.error(
            key,
            f"is {layer}, but layer {entries[-1]} makes entries of its own after it: "
            "its indexer cannot choose inside blocks of others",
        )
    count, size = (fields.integer(each) for each in _CANDIDATE_SIZES)
    top_k = fields.integer("index_topk")
    if count * size - (size - 1) < top_k:
        raise fields.error(
            "candidate_topk_blocks",
            f"{count} of {size} entries, of which the newest may hold one, cannot hold the "
            f"index_topk={top_k} that are chosen",
        )
    return {"candidates": layer, "candidate_blocks": count, "candidate_block_size": size}
