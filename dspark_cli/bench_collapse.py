"""`dspark bench collapse`: what the end of a sharded drafter costs, collapsed before or after."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from dspark_cli.engine_options import Device, DeviceName, TensorParallelSize
from dspark_cli.options import MEASURE, Debug, OutputJson, option
from dspark_cli.output import check_folder, write_json
from dspark_cli.parameters import as_parameters
from dspark_cli.parsers import counts, whole

if TYPE_CHECKING:
    from engine.collapse_bench import TailTime

_HEADER = (
    "| tokens | a rank's rows | gather first, us | collapse first, us | times as fast "
    "| received KB, gather first | collapse first | times less |\n" + "|---" * 8 + "|\n"
)

Tokens = Annotated[
    str,
    option(MEASURE, "Tokens over all processes.", parser=counts, metavar="N,N,..."),
]
HiddenSize = Annotated[
    int, option(MEASURE, "Columns of a stream.", parser=whole(1, 1 << 20), metavar="N")
]
Streams = Annotated[
    int, option(MEASURE, "Residual streams of a token.", parser=whole(1, 64), metavar="N")
]
Samples = Annotated[
    int | None,
    option(
        MEASURE,
        "Times taken of each order. Default: 50 on cuda, 5 on cpu.",
        parser=whole(2, 10_000),
        metavar="N",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CollapseOptions:
    """The command's parameters."""

    device: Device = DeviceName.auto
    tensor_parallel_size: TensorParallelSize = None
    tokens: Tokens = "1,7,32,128,512,2048"
    hidden_size: HiddenSize = 5120
    streams: Streams = 4
    samples: Samples = None
    output_json: OutputJson = None
    debug: Debug = False


def bench_collapse(**values: Any) -> None:
    """Time the end of a drafter whose tokens are dealt to the processes of -tp, in both orders.

    Every token has several residual streams, bfloat16, which become one. Gather first: the
    streams and how they collapse go to every process, two exchanges. Collapse first: each process
    collapses its own tokens, one exchange of a fraction of that. Random tensors; outputs of both
    orders are first compared bit for bit with one process's. The table goes to stdout.
    """
    given = CollapseOptions(**values)
    if given.output_json is not None:
        check_folder(given.output_json)
    from engine.collapse_bench import measure_collapse

    made_by, found = measure_collapse(
        given.device.value,
        given.tensor_parallel_size,
        tuple(int(part) for part in given.tokens.split(",")),
        given.hidden_size,
        given.streams,
        given.samples,
    )
    how = "eager and replayed from a graph" if "NCCL" in made_by else "eager"
    sys.stdout.write(_HEADER + "".join(map(_row, found)))
    sys.stdout.write(
        f"{made_by}; {given.streams} streams of {given.hidden_size}, bfloat16; medians of the "
        f"slowest process; outputs equal bit for bit, {how}\n"
    )
    if given.output_json is not None:
        whole_run = {"made_by": made_by, "tails": [asdict(each) for each in found]}
        write_json(given.output_json, whole_run)


def _row(found: "TailTime") -> str:
    from engine.collapse_bench import ORDERS

    before, after = (found.microseconds[order] for order in ORDERS)
    most, least = (found.received_bytes[order] for order in ORDERS)
    return (
        f"| {found.num_tokens} | {found.num_local} | {before:.2f} | {after:.2f} | "
        f"{found.speedup:.2f} | {most / 1e3:.1f} | {least / 1e3:.1f} | {most / least:.4f} |\n"
    )


as_parameters(bench_collapse, CollapseOptions)
