"""New KV blocks of running requests, into the table on the device.

    table[row, column] = block    for each entry

A captured round does it in its graph, where the device says how many there are: the launch alone
takes the host longer than all else that a round has to send. Moves 28 bytes an entry.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs

_BLOCK = 128


def write_blocks(
    table: torch.Tensor, entries: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """Write entries, each of another place.

    Args:
        table: [N, M] int32, out.
        entries: [E, 3] int64: row, column, block.
        count: [1] int64, how many of them there are, the first ones; None: all.
    """
    dims = Dims()
    dims.check("table", table, "N M", torch.int32)
    dims.check("entries", entries, "E 3", torch.int64)
    if count is not None:
        dims.check("count", count, "1", torch.int64)
    impl = write_blocks_triton if table.is_cuda else write_blocks_ref
    impl(table, entries, count)


def write_blocks_ref(
    table: torch.Tensor, entries: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`write_blocks` in torch: the definition a kernel is held to."""
    if count is not None:
        entries = entries[: int(count)]
    row, column, block = entries.unbind(1)
    table[row, column] = block.int()


def write_blocks_triton(
    table: torch.Tensor, entries: torch.Tensor, count: torch.Tensor | None = None
) -> None:
    """`write_blocks` as one launch."""
    if not len(entries):
        return
    _write_blocks_kernel[(triton.cdiv(len(entries), _BLOCK),)](
        table,
        entries,
        entries if count is None else count,
        len(entries),
        table.stride(0),
        COUNTED=count is not None,
        BLOCK=_BLOCK,
        **dependent(table),
    )


# where entries begin depends on the round: not one kernel for each alignment
@triton.jit(
    do_not_specialize=["num_entries"],
    do_not_specialize_on_alignment=["entries_ptr", "count_ptr"],
)
def _write_blocks_kernel(
    table_ptr,  # [N, M] int32, out
    entries_ptr,  # [E, 3] int64
    count_ptr,  # [1] int64; COUNTED only
    num_entries,
    table_row,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = entry < num_entries
    if COUNTED:
        live = live & (entry < tl.load(count_ptr))
    at = entries_ptr + entry * 3
    row = tl.load(at, mask=live, other=0)
    column = tl.load(at + 1, mask=live, other=0)
    block = tl.load(at + 2, mask=live, other=0)
    tl.store(table_ptr + row * table_row + column, block.to(tl.int32), mask=live)
