"""What a step needs of its members' rows, gathered in one launch.

    anchors = anchor[index]   starts = num_computed[index]   tables = block_table[index]   ...
    lens = width, or 0 for the spare row;   seq_lens = starts + width, or 0

A round used to make a dozen small gathers of this, 2 us each. Moves R * (M * 4 + 60) bytes twice.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.contract import Dims
from engine.kernels.launch import dependent, wait_for_inputs


class Layout(NamedTuple):
    """Where members continue. R requests."""

    anchors: torch.Tensor  # [R] int64
    starts: torch.Tensor  # [R] int64, the anchors' positions
    lens: torch.Tensor  # [R] int32, tokens of this step: width, 0 for padding
    seq_lens: torch.Tensor  # [R] int32, KV tokens with this step's; 0 for padding
    block_table: torch.Tensor  # [R, M] int32
    floats: torch.Tensor  # [F, R] float32
    ints: torch.Tensor  # [I, R] int64


def gather_layout(
    index: torch.Tensor,
    anchor: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    width: int,
) -> Layout:
    """Gather rows.

    Args:
        index: [R] int64; the last of the N rows is the spare one, for padding.
        anchor: [N] int64.
        num_computed: [N] int64.
        block_table: [N, M] int32.
        floats: [F, N] float32, more per row.
        ints: [I, N] int64, more per row.
        width: Tokens of each member in this step.
    """
    dims = Dims()
    dims.check("index", index, "R", torch.int64)
    dims.check("anchor", anchor, "N", torch.int64)
    dims.check("num_computed", num_computed, "N", torch.int64)
    dims.check("block_table", block_table, "N M", torch.int32)
    dims.check("floats", floats, "F N", torch.float32)
    dims.check("ints", ints, "I N", torch.int64)
    impl = gather_layout_triton if index.is_cuda else gather_layout_ref
    return impl(index, anchor, num_computed, block_table, floats, ints, width)


def gather_layout_ref(
    index: torch.Tensor,
    anchor: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    width: int,
) -> Layout:
    """`gather_layout` in torch: the definition a kernel is held to."""
    live, starts = index != len(anchor) - 1, num_computed[index]
    return Layout(
        anchor[index],
        starts,
        torch.where(live, width, 0).int(),
        torch.where(live, starts + width, 0).int(),
        block_table[index],
        floats[:, index],
        ints[:, index],
    )


def gather_layout_triton(
    index: torch.Tensor,
    anchor: torch.Tensor,
    num_computed: torch.Tensor,
    block_table: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    width: int,
) -> Layout:
    """`gather_layout` as one launch, a program per member."""
    num_reqs, (num_rows, columns) = len(index), block_table.shape
    for name, x in (("block_table", block_table), ("floats", floats), ("ints", ints)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor")

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=index.device)

    out = Layout(
        empty(num_reqs, dtype=torch.int64),
        empty(num_reqs, dtype=torch.int64),
        empty(num_reqs, dtype=torch.int32),
        empty(num_reqs, dtype=torch.int32),
        empty(num_reqs, columns, dtype=torch.int32),
        empty(len(floats), num_reqs, dtype=torch.float32),
        empty(len(ints), num_reqs, dtype=torch.int64),
    )
    if num_reqs:
        _gather_layout_kernel[(num_reqs,)](
            *out,
            index,
            anchor,
            num_computed,
            block_table,
            floats,
            ints,
            num_rows,
            columns,
            width,
            FLOATS=len(floats),
            INTS=len(ints),
            BLOCK_F=triton.next_power_of_2(max(len(floats), len(ints), 1)),
            BLOCK=min(1024, triton.next_power_of_2(columns)),
            **dependent(index),
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "columns", "width"])
def _gather_layout_kernel(
    anchors_ptr,  # [R] int64, out; so are the next six
    starts_ptr,  # [R] int64
    lens_ptr,  # [R] int32
    seq_lens_ptr,  # [R] int32
    tables_ptr,  # [R, M] int32
    some_floats_ptr,  # [F, R] float32
    some_ints_ptr,  # [I, R] int64
    index_ptr,  # [R] int64
    anchor_ptr,  # [N] int64
    num_computed_ptr,  # [N] int64
    block_table_ptr,  # [N, M] int32
    floats_ptr,  # [F, N] float32
    ints_ptr,  # [I, N] int64
    num_rows,  # N
    columns,  # M
    width,
    FLOATS: tl.constexpr,
    INTS: tl.constexpr,
    BLOCK_F: tl.constexpr,  # >= F, I
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    member = tl.program_id(0).to(tl.int64)
    num_reqs = tl.num_programs(0)
    row = tl.load(index_ptr + member)
    start = tl.load(num_computed_ptr + row)
    tl.store(anchors_ptr + member, tl.load(anchor_ptr + row))
    tl.store(starts_ptr + member, start)
    length = tl.where(row == num_rows - 1, 0, width)
    tl.store(lens_ptr + member, length)
    tl.store(seq_lens_ptr + member, tl.where(length > 0, start + length, 0).to(tl.int32))
    field = tl.arange(0, BLOCK_F)
    some = tl.load(floats_ptr + field * num_rows + row, mask=field < FLOATS, other=0.0)
    tl.store(some_floats_ptr + field * num_reqs + member, some, mask=field < FLOATS)
    more = tl.load(ints_ptr + field * num_rows + row, mask=field < INTS, other=0)
    tl.store(some_ints_ptr + field * num_reqs + member, more, mask=field < INTS)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        block = tl.load(block_table_ptr + row * columns + column, mask=inside, other=0)
        tl.store(tables_ptr + member * columns + column, block, mask=inside)
