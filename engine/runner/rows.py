"""Device state of running requests: a request keeps its row from admission to the end."""

from collections.abc import Sequence as Items

import torch

from engine.kernels.sampling import SamplingRows
from engine.request import SamplingParams


class Rows:
    """N rows and a spare one, which padding points to.

    The host writes a row when its request starts or grows; rounds advance it on the device. All
    writes are ordered on one stream, so a row may be given away while a round on it still runs.
    """

    def __init__(self, num_rows: int, blocks_per_row: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.spare = num_rows
        """Index of the row that belongs to nobody."""

        num_rows += 1
        self.block_table = zeros(num_rows, blocks_per_row, dtype=torch.int32)
        self.anchor = zeros(num_rows, dtype=torch.int64)
        self.num_computed = zeros(num_rows, dtype=torch.int64)
        self._floats = zeros(num_rows, 3, dtype=torch.float32)
        self._ints = zeros(num_rows, 2, dtype=torch.int64)
        self._num_blocks = [0] * num_rows

    def params(self, index: torch.Tensor) -> SamplingRows:
        """Sampling parameters of the rows at `index` [R] int64."""
        floats, ints = self._floats[index], self._ints[index]
        return SamplingRows(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0],
            noise_key=ints[:, 1],
        )

    def start(self, rows: Items[int], params: Items[SamplingParams], keys: Items[int]) -> None:
        """Bind requests to rows: their sampling parameters and noise keys."""
        index = self.upload(torch.tensor(list(rows)))
        floats = torch.tensor([[p.temperature, p.top_p, p.min_p] for p in params])
        ints = torch.tensor([[p.top_k, key] for p, key in zip(params, keys, strict=True)])
        self._floats[index] = self.upload(floats)
        self._ints[index] = self.upload(ints)
        for row in rows:
            self._num_blocks[row] = 0

    def set_blocks(self, rows: Items[int], blocks: Items[list[int]]) -> None:
        """Copy what the rows' tables lack, in one go; a request's blocks only ever grow."""
        new = [
            (row, column, ids[column])
            for row, ids in zip(rows, blocks, strict=True)
            for column in range(self._num_blocks[row], len(ids))
        ]
        if not new:
            return
        for row, ids in zip(rows, blocks, strict=True):
            self._num_blocks[row] = len(ids)
        where = self.upload(torch.tensor(new))
        self.block_table[where[:, 0], where[:, 1]] = where[:, 2].int()

    def place(self, index: torch.Tensor, num_computed: torch.Tensor, anchor: torch.Tensor) -> None:
        """Put rows `index` [R] before their next round: both values [R] int64."""
        self.num_computed[index] = num_computed
        self.anchor[index] = anchor

    def upload(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device without waiting for it."""
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True)
        return x
