"""Device state of running requests: a request keeps its row from admission to the end."""

from collections.abc import Sequence as Items

import torch

from engine.kernels.layout import Layout, gather_layout
from engine.kernels.sampling import SamplingRows
from engine.kernels.write_blocks import write_blocks
from engine.request import SamplingParams
from engine.runner.uploads import Uploads


class Rows:
    """N rows and a spare one, which padding points to.

    The host writes a row when its request starts or grows; rounds advance it on the device. All
    writes are ordered on one stream, so a row may be given away while a round on it still runs.
    """

    def __init__(self, num_rows: int, blocks_per_row: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.uploads = Uploads(device)
        self.spare = num_rows
        """Index of the row that belongs to nobody."""

        num_rows += 1
        self.block_table = zeros(num_rows, blocks_per_row, dtype=torch.int32)
        self.anchor = zeros(num_rows, dtype=torch.int64)
        self.num_computed = zeros(num_rows, dtype=torch.int64)
        self._floats = zeros(3, num_rows, dtype=torch.float32)
        self._ints = zeros(2, num_rows, dtype=torch.int64)
        self._num_blocks = [0] * num_rows

    def layout(self, index: torch.Tensor, width: int) -> tuple[Layout, SamplingRows]:
        """Where rows `index` [R] int64 continue with `width` tokens each, and their parameters."""
        at = gather_layout(
            index,
            self.anchor,
            self.num_computed,
            self.block_table,
            self._floats,
            self._ints,
            width,
        )
        return at, _sampling_rows(at.floats, at.ints)

    def params(self, index: torch.Tensor) -> SamplingRows:
        """Sampling parameters of the rows at `index` [R] int64."""
        return _sampling_rows(self._floats[:, index], self._ints[:, index])

    def start(self, rows: Items[int], params: Items[SamplingParams], keys: Items[int]) -> None:
        """Bind requests to rows: their sampling parameters and noise keys."""
        index = self.uploads.send_integers(rows)
        floats = [[getattr(p, f) for p in params] for f in ("temperature", "top_p", "min_p")]
        ints = [[p.top_k for p in params], list(keys)]
        self._floats[:, index] = self.uploads.send(torch.tensor(floats))
        self._ints[:, index] = self.uploads.send(torch.tensor(ints))
        for row in rows:
            self._num_blocks[row] = 0

    def set_blocks(self, rows: Items[int], blocks: Items[list[int]]) -> None:
        """Copy what the rows' tables lack, in one go."""
        self.send_blocks(self.new_blocks(rows, blocks))

    def new_blocks(self, rows: Items[int], blocks: Items[list[int]]) -> list[int]:
        """What the rows' tables lack, which the caller brings there before anybody reads them.

        A request's blocks only ever grow.

        Returns:
            Row, column and block of each.
        """
        known, new = self._num_blocks, list[int]()
        for row, ids in zip(rows, blocks, strict=True):
            if known[row] < len(ids):
                for column in range(known[row], len(ids)):
                    new += row, column, ids[column]
                known[row] = len(ids)
        return new

    def send_blocks(self, new: list[int]) -> None:
        """Bring what `new_blocks` has found to the tables."""
        if new:
            write_blocks(self.block_table, self.uploads.send_integers(new).view(-1, 3))

    def write_blocks(self, count: torch.Tensor, entries: torch.Tensor) -> None:
        """The same of what is on the device already.

        Args:
            count: [1] int64, how many there are.
            entries: [3 E] int64, row, column and block of each.
        """
        write_blocks(self.block_table, entries.view(-1, 3), count)

    def place(self, index: torch.Tensor, num_computed: torch.Tensor, anchor: torch.Tensor) -> None:
        """Put rows `index` [R] before their next round: both values [R] int64."""
        self.num_computed[index] = num_computed
        self.anchor[index] = anchor


def _sampling_rows(floats: torch.Tensor, ints: torch.Tensor) -> SamplingRows:
    """Of [3, R] and [2, R], in the order `Rows.start` writes."""
    temperature, top_p, min_p = floats.unbind()
    top_k, noise_key = ints.unbind()
    return SamplingRows(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, noise_key=noise_key
    )
