"""`dspark inspect`: what checkpoints are, whether they fit, and what memory they take."""

import json
from collections import Counter
from typing import Annotated, Any

import typer

from dspark_cli import options
from dspark_cli.parsers import size, whole
from engine.inspection import DTYPE_BYTES, describe

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHARING = {
    "absent": "not in the file; the target's is used",
    "equal": "in the file, equal to the target's; kept once",
    "own": "in the file, its own",
    "unknown": "in the file; give the target first to compare",
}


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Target or draft: a folder, demo, or a Hub id."),
    ],
    draft: Annotated[
        str | None, typer.Argument(metavar="DRAFT", help="A DSpark draft for MODEL.")
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            parser=whole(1), metavar="N", help="Requests at once in the memory plan; default 32."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="N",
            help="Tokens per request in the memory plan; default: all the checkpoint allows.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: options.Debug = False,
) -> None:
    """Tell what a checkpoint is, whether a draft fits it, and what memory they take.

    Reads configs and tensor headers; needs no GPU. Exits with 2 if tensors are
    missing or left over, or the pair does not fit.
    """
    report = describe(model, draft, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo("\n\n".join(_sections(report)))
    if any(report[part] and not report[part]["fits"] for part in ("tensors", "pair")):
        raise typer.Exit(2)


def _sections(report: dict[str, Any]) -> list[str]:
    parts = []
    if report["target"] is not None:
        parts.append(_table("Target", _target_rows(report["target"])))
    if report["draft"] is not None:
        parts.append(_table("Draft", _draft_rows(report["draft"])))
    if report["tensors"] is not None and not report["tensors"]["fits"]:
        parts.append(
            f"Tensors\n  {report['tensors']['problem']}\n  hint: {report['tensors']['hint']}"
        )
    if report["pair"] is not None:
        parts.append(_pair_text(report["pair"]))
    parts.append(_table(*_memory(report["memory"])))
    return parts


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name.ljust(width)}  {value}" for name, value in rows)])


def _common_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("path", found["path"]),
        ("format", found["format"]),
        (
            "parameters",
            f"{found['parameters']:,} in {_count(found, 'tensor')}, {_count(found, 'file')}, "
            f"{found['stored_dtype']}, {human(found['file_bytes'])}",
        ),
    ]
    rows += _v4_rows(found) if "experts" in found["layers"] else _dense_rows(found)
    return [*rows, ("positions", f"{found['max_position']:,}")]


def _v4_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Layers of a DeepSeek-V4."""
    layers, experts, index = (
        found["layers"],
        *(found["layers"][n] for n in ("experts", "indexer")),
    )
    kinds = Counter(layers["kinds"])
    said = {
        "window": f"see {layers['window']} tokens",
        "sparse": f"also {index['top_k']} entries of {layers['sparse_ratio']} tokens",
        "heavy": f"also all entries of {layers['heavy_ratio']} tokens",
    }
    parts = [f"{kinds[kind]} {kind} ({text})" for kind, text in said.items() if kinds[kind]]
    parts += _shared_parts(layers)
    hashed, other = sum(layers["hashed"]), layers["compressed_rope"]
    return [
        ("layers", f"{layers['num_layers']}: {', '.join(parts)}"),
        (
            "hidden",
            f"{layers['hidden_size']} in {layers['hyper']['num_streams']} residual streams",
        ),
        (
            "heads",
            f"{layers['num_heads']} query, 1 KV, {layers['head_dim']} wide, {layers['rope_dim']} "
            f"turn; q rank {layers['q_rank']}, output {layers['o_groups']} x {layers['o_rank']}",
        ),
        (
            "experts",
            f"{experts['num_experts']}, {experts['per_token']} a token, {experts['width']} wide, "
            f"and a shared one" + (f"; looked up by token in {hashed} layers" if hashed else ""),
        ),
        (
            "rope",
            f"theta {layers['window_rope']['theta']:g}; beside compressed entries "
            f"{other['theta']:g}, YaRN x {other['factor']:g}",
        ),
    ]


def _shared_parts(layers: dict[str, Any]) -> list[str]:
    """Layers of V4.1 that see entries, by the tokens to each; who makes them, and who chooses."""
    sources = layers["sources"]
    if sources is None:
        return []
    top_k, parts = layers["indexer"]["top_k"], []
    for ratio in sorted({r for r in sources["ratios"] if r}, reverse=True):
        count = sources["ratios"].count(ratio)
        made = [i for i in sources["entries"] if sources["ratios"][i] == ratio]
        of = "1 token" if ratio == 1 else f"{ratio} tokens"
        parts.append(f"{count} shared (also {top_k} entries of {of}, kept by layer{_few(made)})")
    parts.append(f"chosen in layer{_few(sources['choices'])}")
    if sources["candidates"] is not None:
        count, size = sources["candidate_blocks"], sources["candidate_block_size"]
        parts.append(f"those after {sources['candidates']} inside {count} blocks of {size}")
    return parts


def _few(layers: list[int]) -> str:
    return ("s " if len(layers) > 1 else " ") + ", ".join(map(str, layers))


def _dense_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    layers, rope = found["layers"], found["layers"]["rope"]
    extras = [
        name
        for name, on in (
            ("q, k, v biases", layers["qkv_bias"]),
            ("o bias", layers["o_bias"]),
            ("MLP biases", layers["mlp_bias"]),
            ("q and k norms", layers["qk_norm"]),
        )
        if on
    ]
    scaling = "" if rope["kind"] == "default" else f", {rope['kind']} x {rope['factor']:g}"
    return [
        ("layers", f"{layers['num_layers']} ({', '.join(extras) or 'no biases, no q/k norms'})"),
        ("hidden, MLP", f"{layers['hidden_size']}, {layers['intermediate_size']}"),
        (
            "heads",
            f"{layers['num_heads']} query, {layers['num_kv_heads']} KV, {layers['head_dim']} wide",
        ),
        ("rope", f"theta {rope['theta']:g}{scaling}"),
    ]


def _target_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    tied = "tied to" if found["tie_embeddings"] else "apart from"
    eos = ", ".join(map(str, found["eos_token_ids"])) or "none: only stop strings and limits end it"
    return [
        *_common_rows(found),
        *_engram_rows(found.get("engram")),
        ("vocabulary", f"{found['vocab_size']:,}, lm_head {tied} the embedding"),
        ("EOS", eos),
    ]


def _engram_rows(engram: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Tables of a DeepSeek-V4.1."""
    if engram is None:
        return []
    (first, count), *more = engram["rows"].items()
    rows = [f"{count:,} rows in layer {first}", *(f"{n:,} in {layer}" for layer, n in more)]
    sizes = f"of 2 to {engram['longest']} tokens, {engram['width']} numbers a row"
    return [("n-grams", f"{sizes}: {', '.join(rows)}")]


def _draft_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    depth = found["num_target_layers"]
    reduced = found["draft_vocab_size"] < found["vocab_size"]
    own = f"; drafts from {found['draft_vocab_size']:,} of them (d2t)" if reduced else ""
    markov = found["markov"]
    return [
        *_common_rows(found),
        ("tokens per round", f"G = {found['num_speculative_tokens']}, {found['layout']}"),
        (
            "taps",
            f"h{found['taps']} of {depth or 'an unstated number of'} target layers, "
            f"{found['target_hidden_size']} wide (h[0] = embeddings)",
        ),
        ("attention", _attention(found["windows"], found["causal"])),
        ("vocabulary", f"{found['vocab_size']:,}, mask token {found['mask_token_id']}{own}"),
        ("Markov head", markov if markov == "none" else f"{markov}, rank {found['markov_rank']}"),
        ("confidence", found["confidence"]),
        ("embed_tokens", _SHARING[found["embed_tokens"]]),
        ("lm_head", _SHARING[found["lm_head"]]),
    ]


def _attention(windows: list[int], causal: list[bool]) -> str:
    kinds = [
        (f"last {window} context tokens" if window else "full context")
        + (", causal block" if one_way else ", bidirectional block")
        for window, one_way in zip(windows, causal, strict=True)
    ]
    if len(set(kinds)) == 1:
        return kinds[0]
    return "; ".join(f"layer {i}: {kind}" for i, kind in enumerate(kinds))


def _pair_text(pair: dict[str, Any]) -> str:
    if pair["fits"]:
        return "Pair\n  fits: sizes, vocabulary, layers and tokenizer agree"
    return f"Pair\n  does not fit: {pair['problem']}\n  hint: {pair['hint']}"


def _memory(plan: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    title = f"Memory, {plan['max_num_seqs']} requests of {plan['max_model_len']:,} tokens"
    rows = []
    for dtype in DTYPE_BYTES:
        part = plan[dtype]
        weights, per_token = part["weight_bytes"], part["kv_bytes_per_token"]
        rows += [
            (dtype, f"{human(part['total_bytes'])} in all"),
            ("  weights", f"target {human(weights['target'])}, draft {human(weights['draft'])}"),
            (
                "  KV",
                f"{human(part['kv_bytes'])}: target {human(per_token['target'])} + draft "
                f"{human(per_token['draft'])} a token{_per_request(part)}",
            ),
        ]
        for layout, found in part.get("attention_parallel", {}).items():
            rows.append((f"  GPUs, {layout}", _gpus(part, found)))
    return title, rows


def _per_request(part: dict[str, Any]) -> str:
    each = part.get("kv_bytes_per_request")
    if each is None:
        return ""
    return f", {human(each['target'])} + {human(each['draft'])} a request"


def _gpus(part: dict[str, Any], found: dict[str, Any]) -> str:
    """With one `--attention-parallel`; of GB, as their makers count them."""
    size = f"{part['gpu_bytes'] / 1e9:.0f} GB"
    weights, kept = (f"{found[n] / 1e9:.1f}" for n in ("weight_bytes_each", "kv_bytes_each"))
    each = f"{found['bytes_each'] / 1e9:.1f} GB ({weights} weights, {kept} requests)"
    if found["gpus"] is None:
        return f"more of {size} than its heads can be dealt to: at the most, {each} each"
    return f"{found['gpus']} of {size}, {each} on each of at most {part['usable']:.0%}"


def _count(found: dict[str, Any], what: str) -> str:
    number = found[what + "s"]
    return f"{number} {what}" + ("" if number == 1 else "s")


def human(count: float) -> str:
    """Bytes in the largest unit that keeps them at 1 or above."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"
