"""Device state of running requests: a request keeps its row from admission to the end."""

import torch

from engine.kernels.sampling import SamplingRows
from engine.request import SamplingParams


class Rows:
    """N rows; the host writes one when its request starts, grows or comes up for a round."""

    def __init__(self, num_rows: int, blocks_per_row: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.block_table = zeros(num_rows, blocks_per_row, dtype=torch.int32)
        self.anchor = zeros(num_rows, dtype=torch.int64)
        self.num_computed = zeros(num_rows, dtype=torch.int64)
        self.params = SamplingRows(
            temperature=zeros(num_rows, dtype=torch.float32),
            top_k=zeros(num_rows, dtype=torch.int64),
            top_p=zeros(num_rows, dtype=torch.float32),
            min_p=zeros(num_rows, dtype=torch.float32),
            noise_key=zeros(num_rows, dtype=torch.int64),
        )
        self._num_blocks = [0] * num_rows

    def start(self, row: int, params: SamplingParams, noise_key: int) -> None:
        """Bind a request to `row`."""
        own = self.params
        own.temperature[row] = params.temperature
        own.top_k[row] = params.top_k
        own.top_p[row] = params.top_p
        own.min_p[row] = params.min_p
        own.noise_key[row] = noise_key
        self._num_blocks[row] = 0

    def set_blocks(self, row: int, block_ids: list[int]) -> None:
        """Copy what `row`'s table lacks; a request's blocks only ever grow."""
        have = self._num_blocks[row]
        if have < len(block_ids):
            new = torch.tensor(block_ids[have:], dtype=torch.int32)
            self.block_table[row, have : len(block_ids)] = new.to(self.device)
            self._num_blocks[row] = len(block_ids)

    def set_state(self, row: int, num_computed: int, anchor: int) -> None:
        """Place `row` before its next round."""
        self.num_computed[row] = num_computed
        self.anchor[row] = anchor
