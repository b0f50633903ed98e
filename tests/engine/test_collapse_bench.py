"""The end of a sharded drafter in both orders, over gloo; on GPUs by hand: pytest -m multi_gpu."""

import json

import pytest
import torch

from dspark_cli.main import run
from engine import collapse_bench
from engine.collapse_bench import ORDERS, TailShapes, TailTime, play
from engine.errors import DSparkError
from engine.models import draft_tail
from tests.helpers.distributed import Ranks, run_ranks


def shapes(device: str, hidden_size: int, *tokens: int) -> TailShapes:
    return TailShapes(tokens, hidden_size, 4, samples=2, warm_up=1, device=device)


def measured(ranks: Ranks, device: str, hidden_size: int) -> None:
    """One token leaves the last rank padding only; both orders are compared, then timed."""
    given = shapes(device, hidden_size, 1, 2 * ranks.size + 1)
    group = ranks.group(all_reduce="nccl")
    found = play(group, given)
    assert [(t.num_tokens, t.num_local) for t in found] == [(1, 1), (2 * ranks.size + 1, 3)]
    for each in found:
        rows = (ranks.size - 1) * each.num_local
        assert each.received_bytes["gather first"] == rows * (4 * hidden_size * 2 + 4 * 4)
        assert each.received_bytes["collapse first"] == rows * hidden_size * 2
        assert all(0 < each.quartiles[o][0] <= each.microseconds[o] for o in ORDERS)
    assert group.control.exchange([t.microseconds for t in found])[0] == [
        t.microseconds for t in found
    ], "all ranks have the same numbers"
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:  # one rank's mistake is every rank's error: none waits for it
            wrong = draft_tail.hc_collapse
            patch.setattr(draft_tail, "hc_collapse", lambda x, pre: -wrong(x, pre))
        with pytest.raises(DSparkError, match=r"1 tokens: outputs differ"):
            play(group, given)


def test_two_ranks_over_gloo() -> None:
    run_ranks(measured, 2, "cpu", 64)


@pytest.mark.multi_gpu
def test_two_gpus() -> None:
    run_ranks(measured, 2, "cuda", 5120, device="cuda")


def test_the_command_prints_times_and_the_payloads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    asked = []

    def fake(*args: object) -> tuple[str, list[TailTime]]:
        asked.append(args)
        times = {ORDERS[0]: 40.0, ORDERS[1]: 20.0}
        spread = dict.fromkeys(ORDERS, (1.0, 50.0))
        received = draft_tail.received_bytes(4, 2, 4, 5120, 2)
        return "NCCL 2.29, 2 ranks", [TailTime(7, 4, times, spread, received)]

    monkeypatch.setattr(collapse_bench, "measure_collapse", fake)
    file = f"{tmp_path}/o.json"
    with pytest.raises(SystemExit) as ended:
        run(["bench", "collapse", "-tp", "2", "--tokens", "7", "--output-json", file])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "| 7 | 4 | 40.00 | 20.00 | 2.00 | 163.9 | 41.0 | 4.0016 |" in out
    assert "NCCL 2.29, 2 ranks; 4 streams of 5120, bfloat16" in out
    assert "eager and replayed from a graph" in out
    assert asked == [("auto", 2, (7,), 5120, 4, None)]
    with open(file, encoding="utf-8") as body:
        assert json.load(body)["tails"][0]["microseconds"]["gather first"] == 40.0


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["bench", "collapse", "--device", "cpu"])
    assert ended.value.code == 2
    assert "give -tp 2 or more" in capsys.readouterr().err


def test_workspaces_are_the_same_batch_on_every_rank() -> None:
    from engine.dist.group import Group

    made = [
        collapse_bench._Workspace.make(3, 5, shapes("cpu", 32, 5), Group()).want for _ in range(2)
    ]
    assert torch.equal(*made)
