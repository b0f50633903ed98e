"""`dspark bench round`: how close rounds come to their matrix products."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from dspark_cli import backend
from dspark_cli.engine_options import EngineOptions, Model, SyntheticAcceptance
from dspark_cli.options import MEASURE, Debug, OutputJson, option
from dspark_cli.output import check_folder, write_json
from dspark_cli.parameters import as_parameters
from dspark_cli.parsers import counts, whole
from dspark_cli.progress import LoadProgress
from dspark_cli.sampling_options import Temperature
from dspark_cli.startup import Startup, process_started
from engine.config import EngineConfig
from engine.errors import ConfigError, DSparkError

if TYPE_CHECKING:
    from engine.measure import RoundTimes

_HEADER = (
    "| requests | kind | round ms | draft | of it Markov | verify | gap | floor | round / floor | "
    "torch's floor | tokens a round | tokens/s | KV read MB |\n" + "|---" * 13 + "|\n"
)


Requests = Annotated[
    str, option(MEASURE, "Batch sizes to measure.", parser=counts, metavar="N,N,...")
]
PromptTokens = Annotated[
    int, option(MEASURE, "Prompt tokens of each request.", parser=whole(1), metavar="N")
]
Rounds = Annotated[
    int, option(MEASURE, "Rounds to time at each size.", parser=whole(1), metavar="N")
]


@dataclass(frozen=True, kw_only=True)
class RoundOptions(EngineOptions):
    """The command's parameters; what follows from the sizes to measure is no option."""

    model: Model
    requests: Requests = "1,8,16,32,64,128,256"
    prompt_tokens: PromptTokens = 128
    rounds: Rounds = 60
    temperature: Temperature = 0.0
    synthetic_acceptance: SyntheticAcceptance = None
    max_num_seqs: int | None = field(default=None, init=False)
    max_model_len: int | None = field(default=None, init=False)
    enable_prefix_caching: bool = field(default=False, init=False)
    output_json: OutputJson = None
    debug: Debug = False

    @property
    def sizes(self) -> list[int]:
        """The batch sizes, rising."""
        return [int(part) for part in self.requests.split(",")]

    def engine_config(self, **derived: Any) -> EngineConfig:
        """The engine's settings, for the largest batch and the longest output."""
        # prompts of a batch take several steps, in each of which the first ones decode; 512 tokens
        # are the least that a step takes by default
        prefills = -(-self.sizes[-1] * self.prompt_tokens // (self.max_num_batched_tokens or 512))
        longest = self.prompt_tokens + 8 * (self.rounds + max(40, prefills + 24))
        return super().engine_config(max_num_seqs=self.sizes[-1], max_model_len=longest, **derived)


def bench_round(**values: Any) -> None:
    """Time rounds and plain steps in the engine's own loop, against their matrix products.

    The floor is the products alone, from one CUDA graph, in the same run: the engine's own ones or
    torch's, whichever are faster. The table goes to stdout.
    --model shape:qwen3-8b is random weights of that shape, with a drafter of its own.
    """
    given = RoundOptions(**values)
    if given.output_json is not None:
        check_folder(given.output_json)
    config = given.engine_config()
    progress = LoadProgress(quiet=False)
    with _own_options():
        engine = backend.load_engine(config, progress)
    progress.close()
    startup = Startup(engine.stats, process_started())
    if startup.memory:
        sys.stderr.write(f"dspark: {startup.memory}\n")
    from engine.measure import describe, measure_round

    measured: list[RoundTimes] = []
    for n in given.sizes:
        for kind in [True, False] if config.draft else [False]:
            with _own_options():
                times = measure_round(
                    engine,
                    n,
                    speculate=kind,
                    prompt_tokens=given.prompt_tokens,
                    rounds=given.rounds,
                    temperature=given.temperature,
                )
            measured.append(times)
            if len(measured) == 1:
                sys.stderr.write(f"dspark: {startup.line()}\n")
    about = {
        **describe(engine),
        "synthetic_acceptance": given.synthetic_acceptance,
        "eager": given.enforce_eager,
        "temperature": given.temperature,
        "ranks": engine.runner.net.ranks.name,
        "sharded from": engine.runner.steps.sharded_from,
    }
    sys.stdout.write(_HEADER + "".join(_row(m) for m in measured))
    sys.stdout.write(", ".join(f"{k} {v}" for k, v in about.items() if v) + "\n")
    if given.output_json is not None:
        whole_run = {"about": about, "rounds": [_numbers(m) for m in measured]}
        write_json(given.output_json, whole_run)


as_parameters(bench_round, RoundOptions)


@contextmanager
def _own_options() -> Iterator[None]:
    """A context in which complaints about the context's length name what decides it here."""
    try:
        yield
    except DSparkError as error:
        if "--max-model-len" not in f"{error} {error.hint}":
            raise
        text = str(error).replace("--max-model-len", "a context of")
        hint = "use fewer --rounds, a smaller --prompt-tokens, or a larger --kv-cache-memory"
        raise ConfigError(text, hint) from None


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
        "-" if m.torch_floor is None else f"{m.torch_floor:.3f}",
        f"{m.committed:.2f}",
        f"{m.tokens_per_second:.0f}",
        f"{m.kv_bytes / 1e6:.0f}",
    )
    return "| " + " | ".join(cells) + " |\n"
