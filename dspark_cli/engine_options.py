"""What decides the engine: its options, declared once, and the settings they mean."""

from dataclasses import dataclass, fields
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any

from dspark_cli.options import MEMORY, MODEL, RUN, SPECULATION, option
from dspark_cli.parsers import real, share, size, whole
from engine.config import MAX_THREADS, EngineConfig
from engine.errors import ConfigError


class DeviceName(StrEnum):
    """Where tensors live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DTypeName(StrEnum):
    """What weights and activations are stored as."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class VerifyName(StrEnum):
    """Which drafts the target checks."""

    all = "all"
    lagged = "lagged"
    sync = "sync"


class ShardedLoopName(StrEnum):
    """When drafting is shared out."""

    auto = "auto"
    on = "on"
    off = "off"


class AttentionParallelName(StrEnum):
    """What the processes of -tp share of a DeepSeek-V4's attention."""

    tensor = "tensor"
    data = "data"
    auto = "auto"


class AllReduceName(StrEnum):
    """How the processes of -tp sum up."""

    auto = "auto"
    nccl = "nccl"


_MODEL = option(
    MODEL,
    "Target: a checkpoint folder, a Hub id, or demo (its drafters: demo, demo-rnn).",
    "--model",
    "-m",
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]
Device = Annotated[DeviceName, option(MODEL, "auto: cuda if there is one, else cpu.")]
DType = Annotated[
    DTypeName, option(MODEL, "auto: the checkpoint's on cuda, float32 on cpu.", "--dtype")
]
MaxModelLen = Annotated[
    int | None,
    option(
        MODEL,
        "Prompt and output tokens of one row; 32k works. Default: the checkpoint's, or what fits.",
        parser=size,
        metavar="N",
    ),
]
Draft = Annotated[
    str | None,
    option(
        SPECULATION,
        "DSpark drafter: a checkpoint folder, a Hub id, demo or demo-rnn (two drafters for --model "
        "demo), or none to decode plainly. Default: none, but demo for --model demo, and a shape's "
        "own for benchmarks.",
        "--draft",
        "-d",
    ),
]
Gamma = Annotated[
    int | None,
    option(
        SPECULATION,
        "Draft tokens per round, without the bonus token. Default: what the drafter was made for.",
        "--num-speculative-tokens",
        "-g",
        parser=whole(1),
        metavar="N",
    ),
]
Verify = Annotated[
    VerifyName | None,
    option(
        SPECULATION,
        "Which drafts the target checks. all: every one. lagged: as many as pay, down to plain "
        "steps, judged by drafts of two rounds ago. sync: judged by this round's, which costs a "
        "wait. Default: lagged. Outputs have the target's distribution in any case; sampled rows "
        "are the same token for token in any batch with all only.",
        "--verify",
    ),
]
CostTableFile = Annotated[
    Path | None,
    option(
        SPECULATION,
        "What rounds cost here, from `dspark profile`. Default: measured when needed.",
        "--cost-table",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    ),
]
CalibrationFile = Annotated[
    Path | None,
    option(
        SPECULATION,
        "What the drafter's confidences mean, from `dspark calibrate`. Default: what they say.",
        "--calibration",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    ),
]
FillTiers = Annotated[
    bool,
    option(
        SPECULATION,
        "On cuda: verify further drafts in place of padding up to a captured size.",
        "--fill-tiers/--no-fill-tiers",
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    option(
        MEMORY,
        "Rows decoded at once. Default: 32 on cpu, 256 on cuda.",
        parser=whole(1),
        metavar="N",
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    option(
        MEMORY,
        "Prompt tokens per prefill step. Default: 512 on cpu, 8192 on cuda.",
        parser=size,
        metavar="N",
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    option(
        MEMORY,
        "Share of device memory to use; what weights and the largest steps leave is KV's.",
        parser=share,
        metavar="P",
    ),
]
KvCacheMemory = Annotated[
    int | None,
    option(
        MEMORY,
        "KV memory of target and draft in place of the share above; 4G works.",
        "--kv-cache-memory",
        "--kv-cache-memory-bytes",
        parser=size,
        metavar="BYTES",
    ),
]
PrefixCaching = Annotated[
    bool,
    option(
        MEMORY,
        "Reuse KV of equal prompt beginnings.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        " /--no-prefix-caching",
    ),
]
Threads = Annotated[
    int | None,
    option(
        MEMORY,
        "CPU threads of a process. Default: 1 or the cores at hand, whichever is faster.",
        parser=whole(1, MAX_THREADS),
        metavar="N",
    ),
]
TensorParallelSize = Annotated[
    int | None,
    option(
        MEMORY,
        "Processes that share the model, a CUDA device each. Default: 1, or torchrun's.",
        "--tensor-parallel-size",
        "-tp",
        parser=whole(1),
        metavar="N",
    ),
]
ShardedLoop = Annotated[
    ShardedLoopName,
    option(
        SPECULATION,
        "With -tp: draft on each process for its own rows only. auto: from the batch size at which "
        "that is faster, measured at start-up.",
    ),
]
AttentionParallel = Annotated[
    AttentionParallelName,
    option(
        MEMORY,
        "With -tp, of a DeepSeek-V4's attention: share its heads and keep each row's cache on all "
        "processes (tensor), share the rows and hold its weights on all (data), or what takes less "
        "memory with as many of the longest rows as may run at once (auto).",
    ),
]
AllReduce = Annotated[
    AllReduceName,
    option(
        MEMORY,
        "With -tp on cuda: sum through NCCL alone, or by the way that is fastest for each size, "
        "measured at start-up.",
    ),
]
AuditRanks = Annotated[
    bool,
    option(
        RUN,
        "With -tp: before every round, not only every 64th, compare what the processes are about "
        "to do, and end all of them (exit code 1) at the first difference.",
        "--audit",
    ),
]
EnforceEager = Annotated[
    bool,
    option(
        MEMORY,
        "On cuda: launch every kernel of a round instead of replaying captured graphs.",
        "--enforce-eager",
    ),
]
SyntheticAcceptance = Annotated[
    float | None,
    option(
        SPECULATION,
        "Commit this many tokens a round on average, whatever the target says: random weights "
        "accept none. For measurements of speed alone.",
        parser=real(1.0),
        metavar="X",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What decides the engine: options of every command that loads one.

    A field named as one of EngineConfig's is given to it as it is. A command that sets one by
    itself declares it anew with `init=False`: it is no option there.
    """

    model: OptionalModel
    draft: Draft = None
    num_speculative_tokens: Gamma = None
    verify: Verify = None
    cost_table: CostTableFile = None
    calibration: CalibrationFile = None
    fill_tiers: FillTiers = EngineConfig.fill_tiers
    device: Device = DeviceName.auto
    dtype: DType = DTypeName.auto
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    gpu_memory_utilization: GpuMemoryUtilization = EngineConfig.gpu_memory_utilization
    kv_cache_memory_bytes: KvCacheMemory = None
    enable_prefix_caching: PrefixCaching = EngineConfig.enable_prefix_caching
    enforce_eager: EnforceEager = EngineConfig.enforce_eager
    threads: Threads = None
    tensor_parallel_size: TensorParallelSize = None
    attention_parallel: AttentionParallel = AttentionParallelName.tensor
    sharded_loop: ShardedLoop = ShardedLoopName.auto
    all_reduce: AllReduce = AllReduceName.auto
    audit: AuditRanks = EngineConfig.audit

    @property
    def is_shape(self) -> bool:
        """Random weights?"""
        return self.model is not None and self.model.startswith("shape:")

    def draft_name(self) -> str | None:
        """The drafter to use: `demo` and shapes bring their own, `none` forbids one."""
        if self.draft is not None:
            return None if self.draft == "none" else self.draft
        return self.model if self.model == "demo" or self.is_shape else None

    def engine_config(self, **derived: Any) -> EngineConfig:
        """The engine's settings.

        Args:
            derived: What the command sets by itself.

        Raises:
            ConfigError: There is no model, or two settings contradict each other.
        """
        if self.model is None:
            raise ConfigError("no --model", "give --model")
        names = {field.name for field in fields(EngineConfig)}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name in names}
        plain = {k: v.value if isinstance(v, Enum) else v for k, v in given.items()}
        return EngineConfig(**{**plain, "draft": self.draft_name(), **derived})
