"""`dspark bench kernels`: every op against its reference, then against the device."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_cli import backend
from dspark_cli.engine_options import Device, DeviceName, Draft, DType, DTypeName, Model, Threads
from dspark_cli.options import MEASURE, Debug, OutputJson, option
from dspark_cli.output import check_folder, write_json
from dspark_cli.parameters import as_parameters
from dspark_cli.parsers import counts, whole
from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.kernel_bench.bench import Measured

WRONG = 1
"""Exit code when an op is."""

_HEADER = "| op | shape | us | GB/s | TFLOP/s | of the ceiling |\n|---|---|---|---|---|---|\n"

Requests = Annotated[
    str, option(MEASURE, "Batch sizes to measure.", parser=counts, metavar="N,N,...")
]
Context = Annotated[int, option(MEASURE, "KV tokens of each request.", parser=whole(1))]
LongContext = Annotated[
    int, option(MEASURE, "KV tokens of each of 64 requests, for attention.", parser=whole(1))
]
PrefillTokens = Annotated[
    int, option(MEASURE, "Tokens of one prompt, for attention.", parser=whole(64))
]
Ops = Annotated[
    str | None, option(MEASURE, "Measure only these. Default: all.", metavar="OP,OP,...")
]


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """The command's parameters."""

    model: Model = "shape:qwen3-8b"
    draft: Draft = None
    device: Device = DeviceName.auto
    dtype: DType = DTypeName.auto
    threads: Threads = None
    requests: Requests = "1,8,64,256"
    context: Context = 256
    long_context: LongContext = 2048
    prefill_tokens: PrefillTokens = 8192
    ops: Ops = None
    output_json: OutputJson = None
    debug: Debug = False

    def engine_config(self) -> EngineConfig:
        """The settings the shapes follow from; a shape or the demo brings its own drafter."""
        own = self.model if self.model == "demo" or self.model.startswith("shape:") else None
        return EngineConfig(
            model=self.model,
            draft=(self.draft or own) if self.draft != "none" else None,
            device=self.device.value,
            dtype=self.dtype.value,
            threads=self.threads,
        )


def bench_kernels(**values: Any) -> None:
    """Time each op at the sizes rounds and prefills ask for, against what the device can do.

    An op is first compared with its reference on the same inputs: at most twice the error of the
    reference in the same dtype. One that is wrong is not timed: it says WRONG, and the exit code is
    1. The ceiling is the device's own speed, measured in the same run: a copy's bytes a second, a
    large product's FLOP a second. On a CPU the references themselves are timed. The table goes to
    stdout.
    """
    given = KernelOptions(**values)
    if given.output_json is not None:
        check_folder(given.output_json)
    rows: list[Measured] = []
    bench = backend.kernel_bench(
        given.engine_config(),
        requests=tuple(int(part) for part in given.requests.split(",")),
        context=given.context,
        long_context=given.long_context,
        prefill=given.prefill_tokens,
    )
    ops = frozenset(given.ops.split(",")) if given.ops is not None else frozenset()
    cases = bench.run(ops)
    about = bench.about()
    sys.stderr.write("dspark: " + ", ".join(f"{k} {v}" for k, v in about.items()) + "\n")
    sys.stdout.write(_HEADER)
    for measured in cases:
        rows.append(measured)
        sys.stdout.write(_row(measured))
        sys.stdout.flush()
    sys.stdout.write(", ".join(f"{k} {v}" for k, v in about.items()) + "\n")
    if given.output_json is not None:
        whole_run = {"about": about, "ops": [asdict(m) for m in rows]}
        write_json(given.output_json, whole_run)
    wrong = sorted({m.op for m in rows if m.wrong is not None})
    if wrong:
        sys.stderr.write(f"dspark: wrong, and not timed: {', '.join(wrong)}\n")
        raise typer.Exit(WRONG)


as_parameters(bench_kernels, KernelOptions)


def _row(m: "Measured") -> str:
    if m.wrong is not None:
        return f"| {m.op} | {m.shape} | WRONG: {m.wrong} | | | |\n"
    rate = f"{m.flops / m.seconds / 1e12:.3g}" if m.flops else ""
    cells = (
        m.op,
        m.shape,
        f"{m.seconds * 1e6:.1f}",
        f"{m.nbytes / m.seconds / 1e9:.0f}",
        rate,
        f"{m.share:.0%} {'matmul' if m.by_flops else 'copy'}",
    )
    return "| " + " | ".join(cells) + " |\n"
