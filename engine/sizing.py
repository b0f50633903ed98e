"""How much a process keeps of requests: context length, rows, KV blocks."""

import os
from dataclasses import dataclass

from engine.checkpoints import Plan
from engine.config import EngineConfig
from engine.dist.group import Group
from engine.errors import CapacityError, ConfigError
from engine.models import families
from engine.models.interface import AnyTarget
from engine.models.layers import Placement
from engine.placing import overlaps
from engine.warmup import CUDA_PREFILL, CUDA_SEQS, Room, gib

_CPU_KV_BYTES = 4 << 30
"""KV memory on a CPU unless asked for more: other programs live there too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes decided before memory is taken."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    lookahead: int
    num_blocks: int
    kv_block_size: int
    graph_pool_bytes: int = 0
    """Memory that captured rounds share, as far as it is known; taken at once."""

    kv_account: str = ""
    """How KV memory came about, where it was measured, and what it cut."""


def model_len(config: EngineConfig, target: AnyTarget) -> int:
    """Context length to serve, before KV memory has its say."""
    if config.max_model_len is not None and config.max_model_len > target.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} exceeds the target's {target.max_position}",
            hint=f"use at most {target.max_position}",
        )
    return config.max_model_len or target.max_position


def seqs_of(config: EngineConfig, at: Placement) -> int:
    """Requests at once."""
    return config.max_num_seqs or (32 if at.device.type == "cpu" else CUDA_SEQS)


def size_kv(
    config: EngineConfig, plan: Plan, at: Placement, wanted: int, room: Room, group: Group
) -> Limits:
    """Divide memory into KV blocks for target and draft together: as many on every rank."""
    lookahead = plan.lookahead(overlapped=overlaps(config, at.device))
    max_num_seqs, on_cpu = seqs_of(config, at), at.device.type == "cpu"
    size, per_block = config.kv_block_size, bytes_of_block(config, plan, at)
    most = at.held(max_num_seqs) * -(-(wanted + lookahead) // size)
    num_blocks = group.least(min(room.kv_bytes // per_block, most))
    held = num_blocks * size - lookahead
    if held < wanted and (config.max_model_len is not None or held < 1):
        need = -(-(wanted + lookahead) // size) * per_block
        # where KV memory was given, what requests take whatever their length has come off it
        rows = 0 if room.account else bytes_of_rows(plan, max_num_seqs, at)
        given = config.kv_cache_memory_bytes is not None
        raise (ConfigError if given else CapacityError)(
            f"KV memory of {room.kv_bytes} bytes holds {max(held, 0)} tokens, one request of "
            f"--max-model-len {wanted} needs {need} bytes"
            + (f" ({gib(room.kv_bytes)} = {room.account})" if room.account else ""),
            hint=f"use --kv-cache-memory {need + rows}"
            + (f", or --max-model-len {held}" if held > 1 else ""),
        )
    account = room.account and f"{gib(num_blocks * per_block)} of {room.account}"
    if held < wanted:
        account = account or f"{gib(num_blocks * per_block)}, as asked"
        account += f"; it holds {held} tokens: contexts end there, not at {wanted}"
    return Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or (512 if on_cpu else CUDA_PREFILL),
        max_model_len=min(wanted, held),
        lookahead=lookahead,
        num_blocks=num_blocks,
        kv_block_size=size,
        graph_pool_bytes=room.graph_pool_bytes,
        kv_account=account,
    )


def bytes_of_block(config: EngineConfig, plan: Plan, at: Placement) -> int:
    """Bytes of one KV block, target and draft together."""
    size = config.kv_block_size
    # where requests keep rings alone, a block costs nothing; it is counted as if it did
    return max(sum(families.bytes_a_block(s, size, at) for s in plan.specs), 1)


def bytes_of_rows(plan: Plan, num_seqs: int, at: Placement) -> int:
    """Bytes that so many requests, and the spare row, take whatever their length, on one rank."""
    each = sum(families.bytes_a_row(s, plan.most_queries, at) for s in plan.specs)
    return (at.held(num_seqs) + 1) * each


def free_memory(config: EngineConfig) -> int:
    """Bytes of a CPU's memory that the KV cache may take once weights are loaded."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(pages * config.gpu_memory_utilization), _CPU_KV_BYTES)
