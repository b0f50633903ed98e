"""Frozen settings, built and validated once; no other file reads a flag or an env var."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
ShardedLoop = Literal["auto", "on", "off"]
AllReduce = Literal["auto", "nccl"]
AttentionParallel = Literal["tensor", "data", "auto"]
Overlap = Literal["auto", "on", "off"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
VerifyMode = Literal["all", "lagged", "sync"]
MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)  # no slots: the CLI reads defaults off the class
class EngineConfig:
    """Everything that decides what the engine computes and how much it holds."""

    model: str
    """Target checkpoint: a directory, a Hub id, or `demo`."""

    draft: str | None = None
    """DSpark checkpoint; None decodes one token a step."""

    num_speculative_tokens: int | None = None
    """Draft tokens per round (gamma); None takes what the draft was trained for."""

    verify: VerifyMode | None = None
    """Which drafts the target checks. all: every one. lagged: as many as pay, none and plain steps
    included, by what drafts of two rounds ago were expected to bring; sync: by this round's, at the
    price of waiting for them. None: lagged."""

    cost_table: Path | None = None
    """File of `dspark profile`: what rounds cost. None: measured before the first run."""

    calibration: Path | None = None
    """File of `dspark calibrate`: what confidences mean. None: what they say."""

    fill_tiers: bool = True
    """On cuda: verify further drafts in place of padding up to a captured size."""

    device: Device = "auto"
    """auto: cuda if there is one, else cpu."""

    dtype: DType = "auto"
    """auto: the checkpoint's dtype on cuda, float32 on cpu."""

    max_num_seqs: int | None = None
    """Requests decoded at once; None: 32 on cpu, 256 on cuda."""

    max_num_batched_tokens: int | None = None
    """Prompt tokens per prefill step; None: 512 on cpu, 8192 on cuda."""

    max_model_len: int | None = None
    """Prompt plus output tokens of one request; None: the checkpoint's, or what KV memory holds."""

    gpu_memory_utilization: float = 0.90
    """Share of device memory for weights, steps and KV: what the largest steps leave is KV's. On
    cpu: share of free memory for KV, at most 4 GiB."""

    kv_cache_memory_bytes: int | None = None
    """KV memory for target and draft together; overrides the share above."""

    kv_block_size: int = 0
    """Tokens per KV block; 0: 32 on a GPU, where attention reads them as one piece, 16 elsewhere,
    where prompts that begin alike share more."""

    enable_prefix_caching: bool = True
    """Reuse KV of equal prompt prefixes."""

    synthetic_acceptance: float | None = None
    """Commit this many tokens a round on average, whatever the target says: benchmarks only."""

    enforce_eager: bool = False
    """On cuda: launch every kernel of a round instead of replaying captured graphs."""

    threads: int | None = None
    """CPU threads of a rank, at most MAX_THREADS; None: as many as the cost table was measured
    with, else 1 or the cores this process may use, shared by its ranks, whichever is faster."""

    tensor_parallel_size: int | None = None
    """Processes that share the model, a CUDA device each; None: what torchrun has started, or 1."""

    attention_parallel: AttentionParallel = "tensor"
    """What ranks share of a DeepSeek-V4's attention. tensor: its heads; each rank keeps what it
    keeps of every request. data: its requests; each rank has the whole of attention's weights, and
    keeps its own requests alone. auto: what takes less memory with as many requests as there may
    be, each of the longest."""

    sharded_loop: ShardedLoop = "auto"
    """Does each rank draft for its own requests only? auto: from the batch size at which that is
    faster, measured at start-up."""

    audit: bool = False
    """With several ranks: compare what they are about to do before every round; False: before every
    64th. The first difference ends the run."""

    overlap: Overlap = "auto"
    """Prepare a round while the one before it runs? auto: on cuda."""

    all_reduce: AllReduce = "auto"
    """On cuda with several ranks: the fastest way for each size, measured at start-up; or NCCL."""

    def __post_init__(self) -> None:
        """Reject what cannot run."""
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}",
                "it is a share of the device's memory: give 0.9, say",
            )
        if self.kv_block_size < 0 or self.kv_block_size & (self.kv_block_size - 1):
            raise ConfigError(
                f"kv_block_size must be a power of two, or 0, got {self.kv_block_size}"
            )
        for name in (
            "num_speculative_tokens",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "kv_cache_memory_bytes",
            "threads",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be >= 1, got {value}")
        if self.max_model_len == 1:
            what = "--max-model-len must be >= 2, got 1"
            raise ConfigError(what, "it holds a prompt of one token and one new one at the least")
        if self.synthetic_acceptance is not None and self.synthetic_acceptance < 1.0:
            raise ConfigError(
                f"--synthetic-acceptance must be >= 1, got {self.synthetic_acceptance}",
                hint="a round commits at least the bonus token",
            )
        for name in ("num_speculative_tokens", "verify", "cost_table", "calibration"):
            if getattr(self, name) is not None and self.draft is None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{flag} is set but there is no draft", hint=f"give --draft, or drop {flag}"
                )
        if self.cost_table is not None and self.verify == "all":
            raise ConfigError("--verify all weighs no costs: --cost-table is unused", "drop one")

    def without_effect(self, *, on_cuda: bool, num_ranks: int, has_confidence: bool) -> list[str]:
        """Settings that were changed and change nothing here, each with the reason.

        Args:
            on_cuda: Where it runs.
            num_ranks: Processes that share the model.
            has_confidence: Does each draft come with a confidence?
        """
        alone, cpu = num_ranks == 1, not on_cuda
        unweighed = self.draft is not None and self.verify == "all"
        reasons = {
            "--audit": (self.audit and alone, "there is one process"),
            "--attention-parallel": (
                self.attention_parallel != "tensor" and alone,
                "there is one process",
            ),
            "--sharded-loop": (self.sharded_loop != "auto" and alone, "there is one process"),
            "--all-reduce": (self.all_reduce != "auto" and (alone or cpu), "it is for -tp on cuda"),
            "--enforce-eager": (self.enforce_eager and cpu, "a CPU captures no graphs"),
            "--no-fill-tiers": (
                not self.fill_tiers and (cpu or self.enforce_eager or unweighed),
                "it is for captured rounds that verify some of their drafts",
            ),
            "--threads": (self.threads is not None and on_cuda, "the device is cuda"),
            "--calibration": (
                self.calibration is not None and (unweighed or not has_confidence),
                "--verify all weighs no confidences" if unweighed else "the drafter has none",
            ),
        }
        return [f"{name} has no effect: {why}" for name, (found, why) in reasons.items() if found]

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for another process."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "EngineConfig":
        """What `to_json` gave, back."""
        paths = {n: Path(values[n]) for n in ("cost_table", "calibration") if values[n]}
        return cls(**{**values, **paths})

    def without_draft(self) -> "EngineConfig":
        """The same target and limits, decoding plainly."""
        return replace(
            self,
            draft=None,
            num_speculative_tokens=None,
            verify=None,
            cost_table=None,
            calibration=None,
            fill_tiers=True,
            sharded_loop="auto",
        )
