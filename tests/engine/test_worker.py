"""Threads of a CPU process: picked in the networks' dtype, or taken from the cost table."""

import json
from pathlib import Path

import pytest
import torch

from engine.placing import pick_threads
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_threads_are_picked_in_any_dtype(tmp_path: Path, dtype: str) -> None:
    # rows in float32 ended every bfloat16 run on a CPU
    engine = make_engine(write_target(tmp_path, "Qwen3ForCausalLM"), dtype=dtype)
    before = torch.get_num_threads()
    try:
        assert pick_threads(engine.runner.net.target, 2) in (1, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cost_table_brings_its_threads(tmp_path: Path, threads: int) -> None:
    # picked anew at each start, they made the same command refuse the file now and then
    pair = write_target(tmp_path / "t", "Qwen3ForCausalLM"), write_draft(tmp_path / "d")
    before = torch.get_num_threads()
    try:
        made = make_engine(*pair, threads=threads, max_num_seqs=2, verify=None)
        table = made.profile([1, 2], [2], 1).to_json()
        (tmp_path / "costs.json").write_text(json.dumps(table))
        torch.set_num_threads(before)
        again = make_engine(
            *pair,
            threads=None,
            max_num_seqs=2,
            verify=None,
            cost_table=tmp_path / "costs.json",
        )
        assert torch.get_num_threads() == threads
        assert again.decisions.table is not None
    finally:
        torch.set_num_threads(before)
