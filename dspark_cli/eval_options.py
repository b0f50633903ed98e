"""Options that the evaluations share, and the engine's settings they mean."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_cli import options
from dspark_cli.settings import GenerateOptions
from engine.config import EngineConfig

EVALUATION = "Evaluation"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option under a heading."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Model = Annotated[
    str | None,
    option(options.MODEL, "Target: a checkpoint folder, a Hub id, or demo.", "--model", "-m"),
]
Out = Annotated[
    Path,
    option(
        options.REPORT,
        "Folder for summary.json, per_request.jsonl, matrix.csv, manifest.json, report.html and "
        "the journal that a stopped run goes on from.",
        "--out",
        "-o",
        metavar="DIR",
        file_okay=False,
    ),
]
Overwrite = Annotated[
    bool, option(options.RUN, "Start over: what DIR holds of a run is replaced.", "--overwrite")
]
Limit = Annotated[int | None, option(EVALUATION, "Only the first N rows.", min=1, metavar="N")]
ComparePlain = Annotated[
    bool,
    option(
        EVALUATION,
        "Decode the same rows without the drafter, too: a paired table, flipped ids, exact McNemar "
        "p, both speeds.",
        "--compare-plain",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What decides the engine; the fields are options of every evaluation with a model."""

    model: Model = None
    draft: options.Draft = None
    num_speculative_tokens: options.Gamma = None
    chat_template: options.ChatTemplate = None
    chat_template_kwargs: options.ChatTemplateKwargs = None
    device: options.Device = options.DeviceName.auto
    dtype: options.DType = options.DTypeName.auto
    max_model_len: options.MaxModelLen = None
    max_num_seqs: options.MaxNumSeqs = None
    max_num_batched_tokens: options.MaxNumBatchedTokens = None
    gpu_memory_utilization: options.GpuMemoryUtilization = EngineConfig.gpu_memory_utilization
    kv_cache_memory: options.KvCacheMemory = None
    enable_prefix_caching: options.PrefixCaching = EngineConfig.enable_prefix_caching
    threads: options.Threads = None
    grace: options.Grace = 10.0
    progress_file: options.ProgressFile = None
    quiet: options.Quiet = False
    debug: options.Debug = False

    def as_generate(self, **more: Any) -> GenerateOptions:
        """As options of `dspark generate`, which checks and translates them."""
        names = {field.name for field in fields(GenerateOptions)}
        own = fields(EngineOptions)
        shared = {f.name: getattr(self, f.name) for f in own if f.name in names}
        return GenerateOptions(**{**shared, "input": "", "model": self.model or "", **more})
