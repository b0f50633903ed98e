"""The options of `dspark bench throughput`, and what they mean."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dspark_cli import options
from dspark_cli.engine_options import (
    EngineOptions,
    OptionalModel,
    PrefixCaching,
    SyntheticAcceptance,
)
from dspark_cli.options import MEASURE, option
from dspark_cli.parsers import counts, whole
from dspark_cli.prompt_options import Chat, PromptOptions
from dspark_cli.rows import RowRules
from dspark_cli.sampling_options import MaxTokens, SamplingOptions
from engine.config import EngineConfig
from engine.errors import ConfigError

_RANDOM_LEN = 128

Data = Annotated[
    str | None,
    option(
        MEASURE,
        "Prompts: rows as `dspark generate` reads them, also GSM8K and SPEED-Bench files (first "
        "turns); demo; or random for random token ids. Default: demo with --model demo.",
        metavar="FILE|demo|random",
    ),
]
InputLen = Annotated[
    int | None,
    option(
        MEASURE,
        f"Prompt tokens, with --data random. Default: {_RANDOM_LEN}.",
        parser=whole(1),
        metavar="N",
    ),
]
OutputLen = Annotated[
    int | None,
    option(
        MEASURE,
        f"--max-tokens, with --data random. Default: {_RANDOM_LEN}.",
        parser=whole(1),
        metavar="N",
    ),
]
BatchSizes = Annotated[
    str,
    option(
        MEASURE,
        "Batch sizes to measure, in one load.",
        "--max-num-seqs",
        parser=counts,
        metavar="N,N,...",
    ),
]
NumPrompts = Annotated[
    int | None,
    option(
        MEASURE,
        "Requests at every batch size. Default: 4 times the batch size, at least 8.",
        parser=whole(1),
        metavar="N",
    ),
]
Pairs = Annotated[
    int,
    option(
        MEASURE,
        "Drafted and plain passes at every batch size; they alternate: drafted, plain, plain, "
        "drafted.",
        parser=whole(1),
        metavar="N",
    ),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    option(
        options.REPORT,
        "Measure nothing: print what changed from run A to run B, as files of --output-json or "
        "folders of --out.",
        metavar="A B",
    ),
]
AllowDifferent = Annotated[
    bool,
    option(options.REPORT, "Compare runs of different settings all the same.", "--allow-different"),
]
OutputJson = Annotated[
    str | None,
    option(options.REPORT, "Write all numbers; - writes to stdout.", metavar="FILE"),
]


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(EngineOptions, PromptOptions, SamplingOptions):
    """The command's parameters: a field is an option, its type says how it is spelled."""

    model: OptionalModel = None
    data: Data = None
    input_len: InputLen = None
    output_len: OutputLen = None
    batch_sizes: BatchSizes = "1,2,4,8"
    num_prompts: NumPrompts = None
    pairs: Pairs = 2
    synthetic_acceptance: SyntheticAcceptance = None
    chat: Chat = False
    max_num_seqs: int | None = field(default=None, init=False)  # the largest of batch_sizes
    max_tokens: MaxTokens = 256
    enable_prefix_caching: PrefixCaching = False
    compare: Compare = None
    allow_different: AllowDifferent = False
    output_json: OutputJson = None
    out: options.ReportFolder = None
    overwrite: options.ReplaceReports = False
    quiet: options.Quiet = False
    debug: options.Debug = False

    @property
    def widths(self) -> tuple[int, ...]:
        """The batch sizes, rising."""
        return tuple(int(part) for part in self.batch_sizes.split(","))

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

    def engine_config(self, **derived: Any) -> EngineConfig:
        """The engine's settings, for the largest batch."""
        return super().engine_config(max_num_seqs=self.widths[-1], **derived)

    def rules(self) -> RowRules:
        """What holds for every row that does not say otherwise.

        Raises:
            ConfigError: A sampling option is out of range, or --chat-template-kwargs is not JSON.
        """
        random = {"max_tokens": self.output_len or _RANDOM_LEN} if self.is_random else {}
        return RowRules(
            params=self.params(**random), chat=self.chat, template_kwargs=self.template_kwargs()
        )

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
                self.is_shape and not (self.is_random and self.ignore_eos),
                "random weights know no text and no end of it",
                "add --data random --ignore-eos",
            ),
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
