"""Where a step's tokens lie: small integers, so that what counts is the launch."""

import torch

from engine.kernel_bench.case import Case, Inputs, equal, first
from engine.kernels.slot_mapping import slot_mapping, slot_mapping_ref
from engine.kernels.step_inputs import StepInputs, step_inputs, step_inputs_ref
from engine.kernels.write_blocks import write_blocks, write_blocks_ref

_KV_BLOCK = 32


def step_inputs_case(count: int, width: int, device: torch.device) -> Case:
    """Inputs: anchors [R], following [R, W-1], starts [R], lens [R]."""

    def make() -> Inputs:
        def ids(*shape: int) -> torch.Tensor:
            return torch.randint(0, 1000, shape, device=device)

        lens = torch.full((count,), width, dtype=torch.int32, device=device)
        return ids(count), ids(count, width - 1), ids(count), lens, count * width

    def check(inputs: Inputs, out: StepInputs) -> str | None:
        return first(*map(equal, StepInputs._fields, out, step_inputs_ref(*inputs)))

    return Case(
        op="step_inputs",
        shape=f"{count} x {width}",
        make=make,
        run=lambda inputs: step_inputs(*inputs),
        check=check,
        nbytes=count * (24 * width + 24),
    )


def slot_mapping_case(count: int, width: int, context: int, device: torch.device) -> Case:
    """Inputs: block table [R, M], positions [T], cu [R+1]."""
    columns = -(-(context + width) // _KV_BLOCK)

    def make() -> Inputs:
        table = torch.randperm(count * columns, device=device).view(count, columns).int()
        positions = (context + torch.arange(width, device=device)).repeat(count)
        cu = torch.arange(count + 1, dtype=torch.int32, device=device) * width
        return table, positions, cu, _KV_BLOCK

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        return equal("slots", out, slot_mapping_ref(*inputs))

    return Case(
        op="slot_mapping",
        shape=f"{count} x {width} after {context}",
        make=make,
        run=lambda inputs: slot_mapping(*inputs),
        check=check,
        nbytes=count * width * 20,
    )


def write_blocks_case(count: int, device: torch.device) -> Case:
    """A new block for each of R requests. Inputs: table [R, M], entries [R, 3]."""
    columns = 64

    def make() -> Inputs:
        table = torch.zeros(count, columns, dtype=torch.int32, device=device)
        column, block = (torch.randint(0, n, (count,), device=device) for n in (columns, 1 << 20))
        row = torch.arange(count, device=device)
        return table, torch.stack((row, column, block), dim=1)

    def check(inputs: Inputs, out: torch.Tensor) -> str | None:
        table, entries = inputs
        want = torch.zeros_like(table)
        write_blocks_ref(want, entries)
        return equal("table", out, want)

    return Case(
        op="write_blocks",
        shape=f"{count} of {columns}",
        make=make,
        run=lambda inputs: written(*inputs),
        check=check,
        nbytes=count * 28,
    )


def written(table: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The table, with the entries in it."""
    write_blocks(table, entries)
    return table
