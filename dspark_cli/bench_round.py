"""`dspark bench round`: how close rounds come to their matrix products."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_cli import backend
from dspark_cli.progress import LoadProgress
from engine.config import EngineConfig
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.measure import RoundTimes

_HEADER = (
    "| requests | kind | round ms | draft | of it Markov | verify | gap | floor | round / floor | "
    "tokens a round | tokens/s | KV read MB |\n" + "|---" * 12 + "|\n"
)


def bench_round(
    model: Annotated[str, typer.Option("-m", "--model", help="Target, as shape:qwen3-8b.")],
    draft: Annotated[
        str | None, typer.Option("-d", "--draft", help="Drafter. Default: the shape's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    requests: Annotated[
        str, typer.Option(help="Batch sizes, separated by commas.")
    ] = "1,8,16,32,64,128,256",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time at each size.")] = 60,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Commit this many tokens a round: random weights accept none.",
        ),
    ] = None,
    eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Launch kernels, replay no graphs.")
    ] = False,
    output_json: Annotated[Path | None, typer.Option(help="Write every number here.")] = None,
) -> None:
    """Time rounds and plain steps in the engine's own loop, against their matrix products.

    The floor is the products alone, from one CUDA graph, in the same run. The table goes to stdout.
    """
    sizes = _sizes(requests)
    begin = time.perf_counter()
    own = model if model.startswith("shape:") else None
    config = EngineConfig(
        model=model,
        draft=draft or own,
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        max_num_seqs=max(sizes),
        max_model_len=prompt_tokens + 8 * (rounds + 40),
        enable_prefix_caching=False,
        enforce_eager=eager,
        synthetic_acceptance=synthetic_acceptance,
    )
    engine = backend.load_engine(config, LoadProgress(quiet=False))
    from engine.measure import describe, measure_round

    sys.stderr.write(f"dspark: loaded in {time.perf_counter() - begin:.1f} s\n")
    measured = [
        measure_round(engine, n, speculate=speculate, prompt_tokens=prompt_tokens, rounds=rounds)
        for n in sizes
        for speculate in ([True, False] if config.draft else [False])
    ]
    about = {**describe(engine), "synthetic_acceptance": synthetic_acceptance, "eager": eager}
    sys.stdout.write(_HEADER + "".join(_row(m) for m in measured))
    sys.stdout.write(", ".join(f"{k} {v}" for k, v in about.items() if v) + "\n")
    if output_json is not None:
        whole = {"about": about, "rounds": [_numbers(m) for m in measured]}
        output_json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"--requests must be numbers >= 1 separated by commas, got {text!r}",
            hint="as in --requests 1,8,64",
        )
    return sizes


def _numbers(m: "RoundTimes") -> dict[str, Any]:
    return {**asdict(m), "ratio": m.ratio, "tokens_per_second": m.tokens_per_second}


def _row(m: "RoundTimes") -> str:
    cells = (
        str(m.num_reqs),
        "round" if m.speculating else "plain",
        f"{m.wall:.3f}",
        f"{m.draft:.3f}",
        f"{m.markov:.3f}",
        f"{m.verify:.3f}",
        f"{m.gap:.3f}",
        f"{m.floor:.3f}",
        f"{m.ratio:.3f}",
        f"{m.committed:.2f}",
        f"{m.tokens_per_second:.0f}",
        f"{m.kv_bytes / 1e6:.0f}",
    )
    return "| " + " | ".join(cells) + " |\n"
