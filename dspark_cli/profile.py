"""`dspark profile`: what rounds cost on this machine, as a file for --cost-table."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dspark_cli import backend
from dspark_cli.engine_options import EngineOptions, Model, SyntheticAcceptance
from dspark_cli.fingerprint import dspark_version
from dspark_cli.options import MEASURE, REPORT, Debug, Quiet, option
from dspark_cli.output import check_folder, write_json
from dspark_cli.parameters import as_parameters
from dspark_cli.parsers import counts, counts_to, whole
from dspark_cli.progress import LoadProgress
from engine.config import EngineConfig
from engine.errors import ConfigError

MAX_REQUESTS = 65536
Output = Annotated[
    Path,
    option(REPORT, "Cost table to write, JSON.", "--output", "-o", metavar="FILE", dir_okay=False),
]
Requests = Annotated[
    str | None,
    option(
        MEASURE,
        "Batch sizes to measure; those between are interpolated. Default: 1 to 32 on cpu, to 256 "
        "on cuda.",
        parser=counts_to(MAX_REQUESTS),
        metavar="N,N,...",
    ),
]
Widths = Annotated[
    str,
    option(
        MEASURE,
        "Verify tokens per request to measure, 2 or more; every draft verified comes in any case.",
        parser=counts,
        metavar="N,N,...",
    ),
]
Repeats = Annotated[
    int, option(MEASURE, "Passes over all of it.", parser=whole(1, 1000), metavar="N")
]
_ON_CPU = "1,2,4,8,16,32"
_ON_CUDA = "1,4,8,16,32,64,128,256"


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(EngineOptions):
    """The command's parameters."""

    model: Model
    output: Output
    requests: Requests = None
    widths: Widths = "2,3,4,6"
    repeats: Repeats = 9
    synthetic_acceptance: SyntheticAcceptance = None
    verify: None = field(default=None, init=False)  # nothing is decided here
    cost_table: None = field(default=None, init=False)
    max_num_seqs: int | None = field(default=None, init=False)  # the largest of requests
    quiet: Quiet = False
    debug: Debug = False

    def sizes(self, on_cuda: bool) -> list[int]:
        """Batch sizes, rising."""
        text = self.requests or (_ON_CUDA if on_cuda else _ON_CPU)
        return [int(part) for part in text.split(",")]

    def engine_config(self, **derived: Any) -> EngineConfig:
        """The engine's settings, for the largest batch.

        Raises:
            ConfigError: There is no drafter.
        """
        if self.draft_name() is None:
            raise ConfigError("without a drafter there is nothing to decide", "give --draft")
        most = None if self.requests is None else self.sizes(on_cuda=False)[-1]
        return super().engine_config(max_num_seqs=most, **derived)


def _check_widths(widths: list[int], gamma: int) -> None:
    """Refuse what no round verifies."""
    bad = [w for w in widths if not 2 <= w <= gamma + 1]
    # the default is for any drafter
    if bad and widths != [int(part) for part in ProfileOptions.widths.split(",")]:
        raise ConfigError(
            f"--widths {bad[0]} is out of range; a round of this drafter verifies 2 to {gamma + 1} "
            "tokens per request",
            f"give numbers from 2 to {gamma + 1}",
        )


def profile(**values: Any) -> None:
    """Measure draft passes, plain steps and verification by batch size and verify tokens.

    On the engine as it runs, graphs and all. The file names the pair, the device and what else
    decides the times; another pair or device refuses it.
    """
    given = ProfileOptions(**values)
    config = given.engine_config()
    check_folder(given.output)
    progress = LoadProgress(given.quiet)
    try:
        engine = backend.load_engine(config, progress)
        sizes = given.sizes(engine.config.device == "cuda")
        widths = [int(part) for part in given.widths.split(",")]
        _check_widths(widths, engine.gamma)
        table = engine.profile(sizes, widths, given.repeats)
    finally:
        progress.close()
    found = table.to_json()
    found["about"] |= {
        "dspark": dspark_version(),
        "model": engine.config.model,
        "draft": engine.config.draft,
        "max_model_len": engine.max_model_len,
    }
    write_json(given.output, found)
    if not given.quiet:
        sys.stderr.write(f"{show(found)}\ndspark: wrote {given.output}\n")


as_parameters(profile, ProfileOptions)


def show(table: dict[str, Any]) -> str:
    """A cost table for people, milliseconds."""
    lines = ["| requests | tokens | what | ms | spread |", "|---|---|---|---|---|"]
    lines += [
        f"| {c['requests']} | {c['tokens']} | {name} | {c['ms']:.3f} | {c['spread']:.3f} |"
        for name in ("draft", "plain", "verify")
        for c in table[name]
    ]
    kv = table["kv"]
    per_token = f"{1e3 * kv['plain']:.4f} us plain, {1e3 * kv['round']:.4f} us drafted"
    lines.append(f"at {table['context']} KV tokens a request; each more: {per_token}")
    return "\n".join(lines)
