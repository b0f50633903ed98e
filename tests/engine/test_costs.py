"""What rounds cost, measured by an engine: once, as far as needed, and without a trace."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ConfigError, Request, worker
from engine.errors import CapacityError, RequestError
from tests.helpers.checkpoints import write_draft, write_target
from tests.helpers.engines import make_engine, outputs, prompts, requests
from tests.helpers.host_graphs import use_host_graphs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "target", "Qwen3ForCausalLM"), write_draft(folder / "draft")


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> dict[str, tuple[int, ...]]:
    return outputs(make_engine(pair[0], max_num_seqs=1), requests(prompts(12)))


def test_engine_measures_costs_once_and_only_as_far_as_needed(pair: tuple[Path, Path]) -> None:
    engine = make_engine(*pair, max_num_seqs=12, verify="lagged")
    assert engine.decisions.table is None
    assert engine.prepare(3) is not None
    table = engine.decisions.table
    assert table is not None
    assert table.max_requests == 3
    assert engine.prepare(2) is None
    outputs(engine, requests(prompts(2)))
    assert engine.decisions.table is table
    assert make_engine(*pair, verify="all").prepare() is None
    assert make_engine(pair[0]).prepare() is None
    before = dict(engine.stats.seconds)
    assert engine.prepare(9) is not None
    after = dict(engine.stats.seconds)
    assert after.pop("warm-up") > before.pop("warm-up") > 0
    assert after == before, "measuring is not decoding"
    assert engine._scheduler.num_free_blocks == engine.limits.num_blocks


@pytest.mark.parametrize("captured", [False, True])
def test_rounds_are_measured_for_as_many_as_there_are_blocks_for(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]], captured: bool
) -> None:
    """A cache of fewer blocks than requests ended the run before its first row, by an assertion."""
    per_block = 2 * 4 * 1 * 8 * 4 * (3 + 2)
    few = {"max_model_len": 64, "kv_cache_memory_bytes": 38 * per_block}
    engine = make_engine(*pair, max_num_seqs=40, verify="lagged", **few)
    if captured:
        use_host_graphs(engine)
    room = engine.decisions._meter.room
    assert 1 < room < 40
    assert outputs(engine, requests(prompts(12))) == plain
    assert engine.decisions.table is not None
    assert engine.decisions.table.max_requests == room
    assert engine.prepare() is None, "nor is it tried again"
    assert engine.stats.preemptions > 0
    with pytest.raises(CapacityError, match=f"blocks for {room} requests at once, 40 are to be"):
        engine.profile(sizes=[1, 40])


def test_too_little_memory_that_was_asked_for_is_a_usage_error(pair: tuple[Path, Path]) -> None:
    """Exit code 2, and the hint works. It was 1, as if the device had been too small."""
    with pytest.raises(ConfigError, match="1024 bytes holds 0 tokens") as info:
        make_engine(*pair, max_model_len=64, kv_cache_memory_bytes=1024)
    asked = re.fullmatch(r"use --kv-cache-memory (\d+)", info.value.hint)
    assert asked is not None
    make_engine(*pair, max_model_len=64, kv_cache_memory_bytes=int(asked[1]))
    with pytest.raises(ConfigError):
        make_engine(*pair, max_model_len=64, kv_cache_memory_bytes=int(asked[1]) - 1)


@pytest.mark.parametrize("captured", [False, True])
def test_no_measured_round_pays_for_the_blocks_of_a_whole_context(
    pair: tuple[Path, Path], captured: bool
) -> None:
    """The first one did: 256 draft passes of 0.5 ms were told as 2.2 ms, and not made."""
    engine = make_engine(*pair, max_num_seqs=6, verify="lagged")
    if captured:
        use_host_graphs(engine)
    rows, meter = engine.runner.rows, engine.decisions._meter
    timed, late, told = False, 0, 0
    new_blocks, time = rows.new_blocks, meter._time

    def watched(of: list[int], blocks: list[list[int]]) -> list[int]:
        nonlocal late, told
        new = new_blocks(of, blocks)
        told += bool(new)
        late += bool(new) and timed
        return new

    def timing(*given: Any) -> Any:
        nonlocal timed
        timed = True
        try:
            return time(*given)
        finally:
            timed = False

    rows.new_blocks = watched  # type: ignore[method-assign, assignment]
    meter._time = timing  # type: ignore[method-assign]
    engine.prepare()
    assert told > 0
    assert late == 0


def test_measuring_leaves_no_trace_in_outputs(
    pair: tuple[Path, Path], plain: dict[str, tuple[int, ...]]
) -> None:
    engine = make_engine(*pair, max_num_seqs=12, verify="lagged")
    for _ in range(2):
        assert outputs(engine, requests(prompts(12))) == plain


def test_files_of_another_pair_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    engine = make_engine(*pair, verify="lagged")
    engine.prepare(2)
    assert engine.decisions.table is not None
    file = tmp_path / "costs.json"
    values = engine.decisions.table.to_json()
    file.write_text(json.dumps(values))
    same = make_engine(*pair, verify="lagged", cost_table=file)
    assert same.prepare(2) is None
    assert same.decisions.table == engine.decisions.table
    values["fingerprint"]["target"] = "another"
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"target is .* here, another there"):
        make_engine(*pair, verify="lagged", cost_table=file)
    with pytest.raises(ConfigError, match="unused"):
        make_engine(*pair, cost_table=file)


def test_measuring_what_rounds_cost_stops_where_memory_does(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # sizes above 3 do not fit: the run used to end in the measurement's error
    engine = make_engine(*pair, verify="lagged", max_num_seqs=8)
    real, free = engine.runner.verify, engine.decisions._meter._pools[0].num_free

    def verify(batch: Any, *rest: Any) -> Any:
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\n")
        return real(batch, *rest)

    monkeypatch.setattr(engine.runner, "verify", verify)
    assert engine.prepare(8) is not None
    table = engine.decisions.table
    assert table is not None
    assert table.max_requests == 2
    assert engine.prepare(8) is None  # known: not tried again
    assert engine.decisions._meter._pools[0].num_free == free


def test_a_table_of_more_threads_than_there_are_cores_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of a core each took the two threads of a table: a quarter slower, and silent."""
    table = make_engine(*pair, max_num_seqs=2, verify="lagged", threads=1).profile(sizes=[1, 2])
    values = table.to_json()
    (tmp_path / "costs.json").write_text(json.dumps(values))
    more = {**values, "about": {**values["about"], "threads": 2}}
    (tmp_path / "more.json").write_text(json.dumps(more))
    monkeypatch.setattr(worker, "usable_cores", lambda: 1)
    given = {"max_num_seqs": 2, "verify": "lagged", "threads": None}
    with pytest.raises(
        ConfigError, match="measured with 2 threads, this engine has 1 core"
    ) as info:
        make_engine(*pair, cost_table=tmp_path / "more.json", **given)
    assert info.value.hint == "measure it again with --threads 1"
    make_engine(*pair, cost_table=tmp_path / "costs.json", **given)


def test_a_context_that_memory_cuts_is_told(pair: tuple[Path, Path]) -> None:
    """Rows ended at 120 tokens of 2048, and nothing said why; the hint was to ask for 2048."""
    engine = make_engine(*pair, max_model_len=None, kv_cache_memory_bytes=16 << 10)
    held = engine.max_model_len
    whole = engine.runner.net.target.spec.max_position
    assert held < whole
    said = f"it holds {held} tokens: contexts end there, not at {whole}"
    assert said in engine.stats.kv_account
    assert "as asked" in engine.stats.kv_account
    with pytest.raises(RequestError) as info:
        engine.validate(Request(request_id="a", prompt_token_ids=(5,) * held))
    assert info.value.hint.endswith("or raise --kv-cache-memory")
    asked = make_engine(*pair, max_model_len=8)
    assert not asked.stats.kv_account
    with pytest.raises(RequestError) as info:
        asked.validate(Request(request_id="a", prompt_token_ids=(5,) * 8))
    assert info.value.hint.endswith("or raise --max-model-len")
