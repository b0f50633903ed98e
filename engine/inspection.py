"""What checkpoints are and what memory they will take, from configs and headers: no torch, no GPU.

Everything is returned as JSON-ready values; `dspark inspect` prints them.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, DSparkError
from engine.locate import locate
from engine.models.config import DraftSpec, LayersSpec, TargetSpec
from engine.models.deepseek_v4_spec import V4DraftSpec, V4TargetSpec
from engine.models.draft_config import draft_format, parse_draft
from engine.models.headers import TensorHeader, read_headers, same_bytes, stored_dtype
from engine.models.target_config import is_target, parse_target

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
DEFAULT_MAX_NUM_SEQS = 32
_FLOATS = ("F64", "F32", "F16", "BF16")
_TARGETS = TargetSpec, V4TargetSpec
_DRAFTS = DraftSpec, V4DraftSpec
_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Found:
    """One checkpoint, parsed."""

    folder: Path
    spec: TargetSpec | DraftSpec | V4TargetSpec | V4DraftSpec
    headers: dict[str, TensorHeader]


def describe(
    model: str,
    draft: str | None = None,
    *,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
) -> dict[str, Any]:
    """Describe a target, a draft, or a pair.

    Args:
        model: A target or a draft: a folder, `demo`, `demo-rnn` or a Hub id.
        draft: A draft for it.
        max_num_seqs: Requests at once, for the memory plan; None: 32.
        max_model_len: Tokens per request; None: what the checkpoint allows.

    Returns:
        Keys `target` and `draft` (None where absent), `pair` (None unless both), `tensors` (None
        for a lone draft) and `memory`.

    Raises:
        CheckpointError: A checkpoint is not supported. A pair that does not fit is told in `pair`.
        ConfigError: A number of the plan is below 1.
    """
    for flag, value in (("--max-num-seqs", max_num_seqs), ("--max-model-len", max_model_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be >= 1, got {value}", f"leave out {flag}")
    found = _find(model, "draft" if model == "demo-rnn" else "target")
    if draft is not None and not isinstance(found.spec, _TARGETS):
        parse_target(found.folder)  # raises: it says what to swap
    target = found if isinstance(found.spec, _TARGETS) else None
    drafter = found if target is None else _find_draft(draft)
    shared = _shared(target, drafter)
    pair = _describe_fit(model, target, draft) if draft is not None else None
    # the memory of a pair that does not fit is the target's
    beside = drafter if pair is None or pair["fits"] else None
    return {
        "target": None if target is None else _describe_target(target),
        "draft": None if drafter is None else _describe_draft(drafter, shared),
        "pair": pair,
        "tensors": _describe_fit(model, target, None),
        "memory": _plan(target, beside, shared, max_num_seqs, max_model_len),
    }


def _find(name: str, role: Any) -> _Found:
    folder = locate(name, role)
    spec = parse_target(folder) if is_target(folder) else parse_draft(folder)
    return _Found(folder, spec, read_headers(folder))


def _find_draft(name: str | None) -> _Found | None:
    if name is None:
        return None
    folder = locate(name, "draft")
    return _Found(folder, parse_draft(folder), read_headers(folder))


def _describe_target(found: _Found) -> dict[str, Any]:
    spec = found.spec
    assert isinstance(spec, _TARGETS)
    return {
        **_files(found),
        "format": spec.architecture,
        "dtype": spec.dtype,
        **_target_layers(spec),
        "vocab_size": spec.vocab_size,
        "tie_embeddings": spec.tie_embeddings,
        "max_position": spec.max_position,
        "eos_token_ids": list(spec.eos_token_ids),
        "bos_token_id": spec.bos_token_id,
    }


def _describe_draft(found: _Found, shared: dict[str, str]) -> dict[str, Any]:
    spec = found.spec
    assert isinstance(spec, _DRAFTS)
    confidence = "hidden + Markov embedding" if spec.confidence_with_markov else "hidden"
    return {
        **_files(found),
        "format": draft_format(found.folder),
        "dtype": spec.dtype,
        "num_speculative_tokens": spec.num_speculative_tokens,
        "layout": "anchor-first" if spec.sample_from_anchor else "fill-in",
        "taps": list(spec.taps),
        "target_hidden_size": spec.target_hidden_size,
        "num_target_layers": spec.num_target_layers,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": spec.draft_vocab_size,
        "mask_token_id": spec.mask_token_id,
        **_draft_layers(spec),
        "markov": spec.markov,
        "markov_rank": spec.markov_rank,
        "confidence": confidence if spec.has_confidence else "none",
        "max_position": spec.max_position,
        "embed_tokens": shared[_EMBED],
        "lm_head": shared[_HEAD],
    }


def _target_layers(spec: TargetSpec | V4TargetSpec) -> dict[str, Any]:
    if isinstance(spec, TargetSpec):
        return {"layers": asdict(spec.layers)}
    from engine import deepseek_v4_inspection

    return deepseek_v4_inspection.describe_target(spec)


def _draft_layers(spec: DraftSpec | V4DraftSpec) -> dict[str, Any]:
    if isinstance(spec, DraftSpec):
        found = {"windows": list(spec.windows), "causal": list(spec.causal)}
        return {"layers": asdict(spec.layers), **found}
    from engine import deepseek_v4_inspection

    return deepseek_v4_inspection.describe_draft(spec)


def _files(found: _Found) -> dict[str, Any]:
    headers = found.headers.values()
    return {
        "path": str(found.folder),
        "files": len({header.file for header in headers}),
        "tensors": len(headers),
        "parameters": sum(_parameters(name, found.headers) for name in found.headers),
        "file_bytes": sum(header.nbytes for header in headers),
        "stored_dtype": stored_dtype(found.headers),
    }


def _parameters(name: str, headers: dict[str, TensorHeader]) -> int:
    """Numbers of a tensor; two in a byte where four bits are one, and none in what scales them."""
    header = headers[name]
    if name.endswith(".weight") and name.removesuffix("weight") + "scale" in headers:
        return header.numel * (1 if header.dtype.startswith("F8") else 2)
    is_scale = name.endswith(".scale") and name.removesuffix("scale") + "weight" in headers
    return header.numel if header.dtype in _FLOATS and not is_scale else 0


def _shared(target: _Found | None, draft: _Found | None) -> dict[str, str]:
    """Where the draft's embedding and head come from: absent, equal, own or unknown."""
    if draft is None:
        return {}
    if target is None:
        names = (_EMBED, _HEAD)
        return {n: "unknown" if n in draft.headers else "absent" for n in names}
    if isinstance(target.spec, V4TargetSpec):
        return dict.fromkeys((_EMBED, _HEAD), "absent")  # the drafter has none of its own
    assert isinstance(target.spec, TargetSpec)
    embed = "model.embed_tokens.weight"
    head = embed if target.spec.tie_embeddings else _HEAD
    return {
        name: _compare(draft.headers.get(name), target.headers.get(of))
        for name, of in ((_EMBED, embed), (_HEAD, head))
    }


def _compare(mine: TensorHeader | None, theirs: TensorHeader | None) -> str:
    if mine is None:
        return "absent"
    return "equal" if theirs is not None and same_bytes(mine, theirs) else "own"


def _describe_fit(model: str, target: _Found | None, draft: str | None) -> dict[str, Any] | None:
    """Would an engine take every tensor, and a pair together? None for a lone draft."""
    if target is None:
        return None
    # torch only here: what the networks want is what they ask for when they are built
    from engine import worker

    try:
        worker.check(EngineConfig(model=model, draft=draft))
    except DSparkError as error:
        return {"fits": False, "problem": str(error), "hint": error.hint}
    return {"fits": True, "problem": None, "hint": None}


def _plan(
    target: _Found | None,
    draft: _Found | None,
    shared: dict[str, str],
    max_num_seqs: int | None,
    max_model_len: int | None,
) -> dict[str, Any]:
    """Bytes by dtype; KV is what `max_num_seqs` requests of full length take."""
    main = target or draft
    assert main is not None
    if isinstance(main.spec, V4TargetSpec | V4DraftSpec):
        return _plan_v4(main, draft, max_num_seqs, max_model_len)
    seqs = max_num_seqs or DEFAULT_MAX_NUM_SEQS
    length = max_model_len or main.spec.max_position
    numbers = {
        "target": 0 if target is None else _held(target, {}),
        "draft": 0 if draft is None else _held(draft, shared),
    }
    slots = {
        name: _kv_numbers(found.spec.layers)
        if found is not None and isinstance(found.spec, TargetSpec | DraftSpec)
        else 0
        for name, found in (("target", target), ("draft", draft))
    }
    plan: dict[str, Any] = {"max_num_seqs": seqs, "max_model_len": length}
    for dtype, size in DTYPE_BYTES.items():
        weights = {name: count * size for name, count in numbers.items()}
        per_token = {name: count * size for name, count in slots.items()}
        kv = sum(per_token.values()) * seqs * length
        plan[dtype] = {
            "weight_bytes": weights,
            "kv_bytes_per_token": per_token,
            "kv_bytes": kv,
            "total_bytes": sum(weights.values()) + kv,
        }
    return plan


def _plan_v4(
    found: _Found, draft: _Found | None, max_num_seqs: int | None, max_model_len: int | None
) -> dict[str, Any]:
    """As `_plan`; requests also take rings, and GPUs are counted."""
    import torch

    from engine import deepseek_v4_inspection as v4

    spec = parse_target(found.folder)
    assert isinstance(spec, V4TargetSpec)
    drafter = None if draft is None else draft.spec
    assert drafter is None or isinstance(drafter, V4DraftSpec)
    seqs = max_num_seqs or DEFAULT_MAX_NUM_SEQS
    length = max_model_len or spec.max_position
    queries = 1 if drafter is None else drafter.num_speculative_tokens + 1
    plan: dict[str, Any] = {"max_num_seqs": seqs, "max_model_len": length}
    for name in DTYPE_BYTES:
        dtype = getattr(torch, name)
        weights = v4.weight_bytes(found.folder, spec, drafter, dtype)
        kept = {"target": v4.state_bytes(spec, queries, dtype), "draft": (0, 0.0)}
        if drafter is not None:
            kept["draft"] = v4.state_bytes(drafter, queries, dtype)
        each = sum(row + token * length for row, token in kept.values())
        plan[name] = {
            "weight_bytes": weights,
            "kv_bytes_per_token": {n: token for n, (_, token) in kept.items()},
            "kv_bytes_per_request": {n: row for n, (row, _) in kept.items()},
            "kv_bytes": seqs * each,
            "total_bytes": sum(weights.values()) + seqs * each,
            **v4.gpus_needed(found.folder, spec, drafter, dtype, seqs, each, sum(weights.values())),
        }
    return plan


def _held(found: _Found, shared: dict[str, str]) -> int:
    """Numbers kept in memory: a copy of the target's embedding or head is not kept twice."""
    dropped = {name for name, state in shared.items() if state == "equal"}
    if isinstance(found.spec, TargetSpec) and found.spec.tie_embeddings:
        dropped = {_HEAD}
    return sum(
        header.numel
        for name, header in found.headers.items()
        if header.dtype in _FLOATS and name not in dropped
    )


def _kv_numbers(layers: LayersSpec) -> int:
    """K and V numbers of one token in all layers."""
    return 2 * layers.num_layers * layers.num_kv_heads * layers.head_dim
