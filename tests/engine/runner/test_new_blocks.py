"""KV blocks that requests get on their way: a captured round brings them to the table itself."""

from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine, outputs, prompts, randomise, requests, teach
from tests.helpers.host_graphs import use_host_graphs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "t", "Qwen3ForCausalLM"), write_draft(folder / "d", markov="rnn")


def watch(engine: Engine) -> tuple[list[int], list[int]]:
    """Blocks sent by themselves, and by rounds; tables are compared before each verification."""
    graphs, rows = use_host_graphs(engine), engine.runner.rows
    alone, along = list[int](), list[int]()
    send, load, verify = rows.send_blocks, graphs.load, engine.runner.verify

    def sent(new: list[int]) -> None:
        alone.append(len(new) // 3)
        send(new)

    def loaded(of: Any, plan: Any, blocks: Any = ()) -> None:
        along.append(len(blocks) // 3)
        load(of, plan, blocks)

    def verified(sequences: Any, plan: Any, drafts: Any) -> Any:
        pending = verify(sequences, plan, drafts)
        for s in sequences:
            assert rows.block_table[s.row, : len(s.block_ids)].tolist() == s.block_ids
        return pending

    rows.send_blocks, graphs.load = sent, loaded  # type: ignore[method-assign]
    engine.runner.verify = verified  # type: ignore[method-assign]
    return alone, along


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("most", [None, 1])
def test_rounds_bring_their_new_blocks_along(
    pair: tuple[Path, Path], late: bool, most: int | None
) -> None:
    """Plain rounds, full and compact ones; with room for one block, others go by themselves."""
    many = requests(prompts(12), max_tokens=40)
    want = outputs(make_engine(*pair), many)
    engine = make_engine(*pair, max_num_seqs=6, kv_block_size=4, overlap="on" if late else "off")
    teach(engine, want, 0.7)
    randomise(engine, 3)
    alone, along = watch(engine)
    graphs = engine.runner.graphs
    assert graphs is not None
    if most is not None:
        graphs.most_blocks = most
    assert outputs(engine, many) == want
    assert {p for p, n in engine.stats.schedule.rounds.items() if n} == {"plain", "full", "compact"}
    assert engine.stats.accepted > 0.3 * engine.stats.drafted > 0, "several blocks a round, some"
    assert max(along) == (most or max(along)) > 0
    rounds = sum(engine.stats.schedule.rounds.values())
    prefills = sum(n > 0 for n in alone)
    assert (prefills > 12) if most else (prefills <= 12 < rounds)


def test_a_round_that_is_not_captured_leaves_its_blocks_to_the_next(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in a capture: what it would have written must not count as written."""
    many = requests(prompts(8), max_tokens=40)
    want = outputs(make_engine(*pair), many)
    engine = make_engine(*pair, max_num_seqs=4, kv_block_size=4)
    watch(engine)
    graphs = engine.runner.graphs
    assert graphs is not None
    draft, calls = graphs.draft, list[int]()

    def failing(plan: Any, needs: Any) -> Any:
        calls.append(1)
        if len(calls) in (3, 9):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return draft(plan, needs)

    monkeypatch.setattr(graphs, "draft", failing)
    assert outputs(engine, many) == want
    assert engine.stats.out_of_memory == 2


def test_what_captures_take_is_told_to_the_planner(pair: tuple[Path, Path]) -> None:
    """400 ms were assumed; a small model needs 80, and did without for five times as long."""
    engine = make_engine(*pair, max_num_seqs=4)
    graphs = use_host_graphs(engine)
    planner = engine.decisions.planner
    for ms in (9000.0, 70.0, 90.0, 80.0):  # the first one compiles
        graphs._note_capture(ms)
    outputs(engine, requests(prompts(4)))
    assert graphs.capture_ms == planner.capture_ms == 85.0
