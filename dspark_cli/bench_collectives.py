"""`dspark bench collectives`: what the exchanges of several processes cost."""

import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from dspark_cli.engine_options import (
    AllReduce,
    AllReduceName,
    Device,
    DeviceName,
    Draft,
    DType,
    DTypeName,
    Model,
    TensorParallelSize,
)
from dspark_cli.options import MEASURE, Debug, OutputJson, option
from dspark_cli.output import check_folder, write_json
from dspark_cli.parameters import as_parameters
from dspark_cli.parsers import counts
from engine.config import EngineConfig

_HEADER = (
    "| exchange | requests | a rank gives | received MB | us | GB/s | |\n" + "|---" * 7 + "|\n"
)

Requests = Annotated[
    str, option(MEASURE, "Batch sizes to measure.", parser=counts, metavar="N,N,...")
]


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions:
    """The command's parameters."""

    model: Model
    draft: Draft = None
    device: Device = DeviceName.auto
    dtype: DType = DTypeName.auto
    tensor_parallel_size: TensorParallelSize = None
    all_reduce: AllReduce = AllReduceName.auto
    requests: Requests = "1,8,64,256"
    output_json: OutputJson = None
    debug: Debug = False

    def engine_config(self) -> EngineConfig:
        """What decides shapes; a shape, and the demo, bring their own drafter."""
        own = self.model if self.model.startswith("shape:") or self.model == "demo" else None
        return EngineConfig(
            model=self.model,
            draft=self.draft or own,
            device=self.device.value,
            dtype=self.dtype.value,
            tensor_parallel_size=self.tensor_parallel_size,
            all_reduce=self.all_reduce.value,
        )


def bench_collectives(**values: Any) -> None:
    """Time the exchanges of a round between the processes of -tp, with their bytes and bandwidth.

    Base logits go to every process (all-gather) or to the owner of their request (all-to-all);
    hidden states are summed twice a layer, or go to the experts of a DeepSeek-V4 and back once; a
    number goes from process 0 to all through the hosts.
    Only the model's shape is used, no weights are read. The table goes to stdout.
    """
    given = CollectivesOptions(**values)
    if given.output_json is not None:
        check_folder(given.output_json)
    from engine.exchanges import measure_exchanges

    sizes = [int(part) for part in given.requests.split(",")]
    made_by, found = measure_exchanges(given.engine_config(), sizes)
    lines = [
        f"| {e.name} | {e.num_reqs or ''} | {e.shape} | {e.num_bytes / 1e6:.3f} | "
        f"{e.microseconds:.1f} | {e.gigabytes_per_second:.2f} | {e.note} |\n"
        for e in found
    ]
    sys.stdout.write(_HEADER + "".join(lines) + f"{made_by}\n")
    if given.output_json is not None:
        whole = {"made_by": made_by, "exchanges": [asdict(e) for e in found]}
        write_json(given.output_json, whole)


as_parameters(bench_collectives, CollectivesOptions)
