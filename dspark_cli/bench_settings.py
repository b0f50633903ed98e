"""The options of `dspark bench throughput`, and what they mean."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from dspark_cli import options
from dspark_cli.settings import GenerateOptions
from engine.errors import ConfigError

MEASURE = "What to measure"
_RANDOM_LEN = 128


def _option(
    panel: str, text: str, *names: str, metavar: str | None = None
) -> typer.models.OptionInfo:
    made: typer.models.OptionInfo = typer.Option(
        *names, help=text, rich_help_panel=panel, metavar=metavar
    )
    return made


Model = Annotated[
    str | None,
    _option(options.MODEL, "Target: a checkpoint folder, a Hub id, or demo.", "--model", "-m"),
]
Data = Annotated[
    str | None,
    _option(
        MEASURE,
        "Prompts: rows as `dspark generate` reads them, also GSM8K and SPEED-Bench files (first "
        "turns); demo; or random for random token ids. Default: demo with --model demo.",
        metavar="FILE|demo|random",
    ),
]
InputLen = Annotated[
    int | None,
    _option(MEASURE, f"Prompt tokens, with --data random. Default: {_RANDOM_LEN}.", metavar="N"),
]
OutputLen = Annotated[
    int | None,
    _option(MEASURE, f"--max-tokens, with --data random. Default: {_RANDOM_LEN}.", metavar="N"),
]
MaxNumSeqs = Annotated[
    str, _option(MEASURE, "Batch sizes to measure, in one load.", metavar="N,N,...")
]
NumPrompts = Annotated[
    int | None,
    _option(
        MEASURE,
        "Requests at every batch size. Default: 4 times the batch size, at least 8.",
        metavar="N",
    ),
]
Pairs = Annotated[
    int,
    _option(
        MEASURE,
        "Drafted and plain passes at every batch size; they alternate: drafted, plain, plain, "
        "drafted.",
        metavar="N",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    _option(
        options.REPORT,
        "Measure nothing: print what changed from run A to run B, as files of --output-json or "
        "folders of --out.",
        metavar="A B",
    ),
]
AllowDifferent = Annotated[
    bool,
    _option(
        options.REPORT, "Compare runs of different settings all the same.", "--allow-different"
    ),
]
OutputJson = Annotated[
    str | None,
    _option(options.REPORT, "Write all numbers; - writes to stdout.", metavar="FILE"),
]
Out = Annotated[
    Path | None,
    _option(
        options.REPORT,
        "Folder for summary.json, per_request.jsonl, matrix.csv, manifest.json, report.html.",
        metavar="DIR",
    ),
]
Overwrite = Annotated[
    bool, _option(options.REPORT, "Replace reports of an earlier run.", "--overwrite")
]


@dataclass(frozen=True)
class ThroughputOptions:
    """The command's parameters: a field is an option, its type says how it is spelled."""

    model: Model = None
    draft: options.Draft = None
    data: Data = None
    input_len: InputLen = None
    output_len: OutputLen = None
    max_num_seqs: MaxNumSeqs = "1,2,4,8"
    num_prompts: NumPrompts = None
    pairs: Pairs = 2
    chat: options.Chat = False
    chat_template: options.ChatTemplate = None
    chat_template_kwargs: options.ChatTemplateKwargs = None
    device: options.Device = options.DeviceName.auto
    dtype: options.DType = options.DTypeName.auto
    max_model_len: options.MaxModelLen = None
    num_speculative_tokens: options.Gamma = None
    max_tokens: options.MaxTokens = 256
    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    top_k: options.TopK = 0
    min_p: options.MinP = 0.0
    seed: options.Seed = 0
    stop: options.Stop = None
    stop_token_id: options.StopTokenId = None
    ignore_eos: options.IgnoreEos = False
    max_num_batched_tokens: options.MaxNumBatchedTokens = None
    gpu_memory_utilization: options.GpuMemoryUtilization = GenerateOptions.gpu_memory_utilization
    kv_cache_memory: options.KvCacheMemory = None
    enable_prefix_caching: options.PrefixCaching = False
    threads: options.Threads = None
    compare: Compare = None
    allow_different: AllowDifferent = False
    output_json: OutputJson = None
    out: Out = None
    overwrite: Overwrite = False
    quiet: options.Quiet = False
    debug: options.Debug = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The batch sizes, rising.

        Raises:
            ConfigError: They are not numbers.
        """
        try:
            found = sorted({int(part) for part in self.max_num_seqs.split(",")})
        except ValueError:
            found = [0]
        if found[0] < 1:
            raise ConfigError(
                f"--max-num-seqs {self.max_num_seqs} is not a list of batch sizes",
                "write 1,2,4,8",
            )
        return tuple(found)

    @property
    def data_name(self) -> str:
        """Where prompts come from.

        Raises:
            ConfigError: Nothing says so.
        """
        if self.data is not None:
            return self.data
        if self.model == "demo":
            return "demo"
        raise ConfigError("no --data", "give --data FILE, demo or random")

    @property
    def is_random(self) -> bool:
        """Random token ids?"""
        return self.data == "random"

    @property
    def prompt_tokens(self) -> int:
        """Of a random prompt."""
        return self.input_len or _RANDOM_LEN

    def generate_options(self) -> GenerateOptions:
        """As `dspark generate` has them: its rules for rows and engine settings hold here too."""
        names = {field.name for field in fields(GenerateOptions)}
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name in names}
        shared |= {"input": "", "max_num_seqs": self.widths[-1]}
        if self.is_random:
            shared["max_tokens"] = self.output_len or _RANDOM_LEN
        return GenerateOptions(**shared)

    def check(self) -> None:
        """Refuse what contradicts itself before anything is loaded.

        Raises:
            ConfigError: A combination makes no sense.
        """
        lengths = self.input_len is not None or self.output_len is not None
        contradictions = (
            (self.model is None, "no --model", "give --model, or --compare A B"),
            (
                lengths and not self.is_random,
                "--input-len and --output-len are for --data random",
                "use --max-tokens to limit outputs",
            ),
            (
                min(self.input_len or 1, self.output_len or 1, self.num_prompts or 1) < 1,
                "--input-len, --output-len and --num-prompts must be >= 1",
                "give larger ones",
            ),
            (self.pairs < 1, f"--pairs must be >= 1, got {self.pairs}", "use 2"),
            (self.allow_different, "--allow-different is for --compare", "drop it"),
            (
                self.overwrite and self.out is None,
                "--overwrite is for --out",
                "drop it",
            ),
        )
        for wrong, message, hint in contradictions:
            if wrong:
                raise ConfigError(message, hint)
