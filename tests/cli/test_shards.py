"""--shard and `dspark merge`: the union of the shards is what one run writes, or it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from dspark_cli.sharding import Shard
from tests.cli.conftest import Bench, Result, read_lines

ROWS: list[Any] = [
    *({"id": f"r{at}", "prompt": f"prompt number {at}"} for at in range(20)),
    {"prompt": "no id"},
    b"not json",
    {"id": 7, "prompt": "a number as id"},
    {"id": "r3", "prompt": "an id that was used"},
    {"id": "several", "prompt": "x", "n": 3, "temperature": 1},
    {"id": "long", "prompt": "y" * 300},
]
METRICS = "metrics.json"


def shards(bench: Bench, count: int, *args: str, only: tuple[int, ...] | None = None) -> None:
    for number in only or range(1, count + 1):
        given = ["generate", str(bench.input), "-o", str(bench.output), *args]
        given += ["-m", str(bench.folder / "m"), "-d", str(bench.folder / "d")]
        result = bench.call(*given, "--shard", f"{number}/{count}")
        assert result.code in (0, 3), result.err


def merge(bench: Bench, *args: str, code: int) -> Result:
    result: Result = bench.call("merge", "-o", str(bench.output), *args)
    assert result.code == code, result.err
    return result


def whole(bench: Bench, *args: str) -> tuple[bytes, bytes]:
    """What one run writes."""
    bench.generate(*args, code=3)
    data = bench.output.read_bytes(), bench.errors_file.read_bytes()
    for path in (bench.output, bench.errors_file, bench.journal):
        path.unlink()
    return data


@pytest.fixture
def split(bench: Bench) -> Bench:
    bench.write(ROWS)
    shards(bench, 3)
    return bench


def test_dry_run_counts_the_rows_of_its_shard(bench: Bench) -> None:
    """Those of all shards are those of the input, bad ones included, as in what runs write."""
    bench.write(ROWS)
    shards(bench, 3)

    def counts(*shard: str) -> dict[str, int]:
        given = ("generate", str(bench.input), "-m", str(bench.folder / "m"), "--dry-run", *shard)
        words = [line.split() for line in bench.call(*given).out.decode().splitlines()]
        return {w[0]: int(w[1]) for w in words if w and w[0] in ("rows", "good", "bad")}

    every = counts()
    assert every == {"rows": len(ROWS), "good": 23, "bad": 3}
    parts = [counts("--shard", f"{number}/3") for number in (1, 2, 3)]
    assert {name: sum(part[name] for part in parts) for name in every} == every
    for number, part in enumerate(parts, 1):
        made = read_lines((bench.folder / f"out.shard-{number}-of-3.jsonl").read_bytes())
        assert len({str(line["id"]) for line in made}) == part["good"]


def test_merged_shards_are_one_run_byte_for_byte(bench: Bench) -> None:
    bench.write(ROWS)
    metrics = bench.folder / METRICS
    want = whole(bench, "--metrics-json", str(metrics))
    of_one = json.loads(metrics.read_text())
    for count in (1, 3, 7):
        shards(bench, count, "--metrics-json", str(metrics))
        merge(bench, "--metrics-json", str(metrics), "--overwrite", code=3)
        assert (bench.output.read_bytes(), bench.errors_file.read_bytes()) == want
        merged = json.loads(metrics.read_text())
        for name in ("rows", "acceptance", "schedule"):
            assert merged[name] == of_one[name], name
        assert merged["speed"]["output_tokens"] == of_one["speed"]["output_tokens"]
        assert len(merged["manifest"]["shards"]) == count
        assert all(e["host"] for e in merged["manifest"]["engines"])
        for path in bench.folder.glob("out.shard-*"):
            path.unlink()


def test_rows_that_are_added_move_no_other_row(split: Bench) -> None:
    before = {p: p.read_bytes() for p in split.folder.glob("out.shard-?-of-3.jsonl")}
    split.write([*ROWS, *({"id": f"new{at}", "prompt": "z"} for at in range(9))])
    shards(split, 3)
    for path, data in before.items():
        assert path.read_bytes().startswith(data)
    split.output.unlink(missing_ok=True)
    merge(split, code=3)
    assert len(split.rows()) == 25 + 9


def test_split_is_what_it_was() -> None:
    """Golden: another split would strand every unfinished run."""
    names = [Shard(1, 1).holds("x"), *(Shard(n, 3).holds("r0") for n in (1, 2, 3))]
    assert names == [True, True, False, False]
    assert [next(n for n in range(1, 6) if Shard(n, 5).holds(i)) for i in range(8)] == [
        3,
        4,
        2,
        3,
        5,
        1,
        2,
        3,
    ]
    sizes = [sum(Shard(n, 4).holds(f"row {i}") for i in range(4000)) for n in (1, 2, 3, 4)]
    assert sum(sizes) == 4000
    assert min(sizes) > 900


@pytest.mark.parametrize("wrong", ["3", "0/3", "4/3", "a/b", "1/0", "-1/3", "1/3/5"])
def test_shard_that_does_not_exist_is_refused(bench: Bench, wrong: str) -> None:
    bench.write(ROWS)
    text = " ".join(bench.generate(f"--shard={wrong}", code=2).err.split())
    assert "write 1/8 to 8/8" in text or "give 1/3 to 3/3" in text or "out of range" in text


def test_rows_stay_what_they_were_whatever_their_shard_is_resumed_with(split: Bench) -> None:
    """A second run with --verify all had nothing to do, and made its rows count as `all`."""
    shards(split, 3, "--verify", "all")
    text = merge(split, code=2).err
    for number in (1, 2, 3):
        assert f"verify: 'all' in 1/3, None in {number}/3 before it was resumed" in text
    shards(split, 3, "--overwrite", "--verify", "all")
    merge(split, code=3)


def test_rows_that_were_made_again_are_of_the_run_that_made_them(bench: Bench) -> None:
    """A longer context or another temperature: what was left as it was belongs to both runs."""
    bench.write(ROWS)
    shards(bench, 3, "--max-model-len", "60")
    shards(bench, 3, "--max-model-len", "150", "--rerun", "failed")
    merge(bench, code=3)
    bench.output.unlink()
    bench.errors_file.unlink()
    shards(bench, 3, "--max-model-len", "150", "--temperature", "0.7", "--force-resume")
    merge(bench, code=3)


def cut_rows(folder: Path, number: int) -> None:
    path = folder / f"out.shard-{number}-of-3.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))


def test_what_is_not_the_whole_run_is_refused_with_a_list(split: Bench) -> None:
    """Nothing is written, whatever is wrong, and the list names it."""
    paths = sorted(split.folder.glob("out.shard-?-of-3.jsonl"))
    one, two, three = map(str, paths)
    assert "shard 2/3 is missing" in merge(split, one, three, code=2).err
    text = merge(split, one, two, two, three, code=2).err
    assert "shard 2/3 is there 2 times" in text

    two_rows = [json.loads(x)["index"] for x in paths[1].read_bytes().splitlines()[-2:]]
    kept = paths[1].read_bytes()
    cut_rows(split.folder, 2)
    text = merge(split, code=2).err
    assert f"missing: row {two_rows[0]}" in text
    assert "shard 2/3 has" in text
    paths[1].write_bytes(kept + kept.splitlines(keepends=True)[-1])
    assert "there twice: row" in merge(split, code=2).err
    paths[1].write_bytes(kept + paths[0].read_bytes().splitlines(keepends=True)[-1])
    assert "is not of shard 2/3" in merge(split, code=2).err
    paths[1].write_bytes(kept)

    journal = split.folder / "out.shard-2-of-3.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"complete"' not in line))
    assert "shard 2/3 is not finished" in merge(split, code=2).err
    paths[1].unlink()  # a run that was stopped has written no output yet
    assert "shard 2/3 is not finished" in merge(split, code=2).err
    paths[1].write_bytes(kept)
    journal.write_bytes(b"".join(lines))

    split.write(ROWS[:-1])
    shards(split, 3, only=(3,))
    text = merge(split, code=2).err
    assert "shard 3/3 has read 25 rows, which are not the 26 of 1/3" in text
    split.write(ROWS)
    shards(split, 3, "--temperature", "0.5", "--overwrite", only=(3,))
    assert "temperature: 0.0 in 1/3, 0.5 in 3/3" in merge(split, code=2).err
    for option, value, was in (
        ("--max-tokens", "3", 1024),
        ("--n", "2", 1),
        ("--verify", "all", None),
        ("--max-model-len", "60", None),
    ):
        shards(split, 3, option, value, "--overwrite", only=(3,))
        text = merge(split, code=2).err
        now = int(value) if value.isdigit() else value
        assert f"{option[2:]}: {was!r} in 1/3, {now!r} in 3/3" in text
    shards(split, 3, "--overwrite", only=(3,))
    assert "-o - is none" in split.call("merge", "-o", "-", one, two, three).err
    assert not split.output.exists()
    merge(split, code=3)


def test_files_of_a_merge_are_not_replaced_unasked(split: Bench) -> None:
    merge(split, code=3)
    assert "exists" in merge(split, code=2).err
    merge(split, "--overwrite", code=3)
    split.output.unlink()
    split.errors_file.unlink()
    text = merge(split, "--metrics-json", str(split.folder / METRICS), code=2).err
    assert "no metrics of shard 1/3" in text
    assert not split.output.exists()
    (split.folder / "out.shard-1-of-3.journal").unlink()
    assert "there is no" in merge(split, code=2).err


def test_a_shard_without_rows_is_whole_though_it_needed_no_engine(bench: Bench) -> None:
    """What is left to the engine is not known of it: its journal says `auto`."""
    bench.write(ROWS[:2])
    shards(bench, 3)
    sizes = [len(p.read_bytes()) for p in bench.folder.glob("out.shard-?-of-3.jsonl")]
    assert 0 in sizes
    for path in bench.folder.glob("out.shard-?-of-3.journal"):
        text = path.read_text()
        if '"type": "row"' in text:
            path.write_text(text.replace('"dtype": "auto"', '"dtype": "float32"'))
    merge(bench, code=0)
    assert len(bench.rows()) == 2


def test_a_shard_resumes_by_itself(bench: Bench) -> None:
    bench.write(ROWS[:20])
    shards(bench, 3)
    journal = bench.folder / "out.shard-2-of-3.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[: len(data) // 2])  # a kill -9 in the middle of a line
    shards(bench, 3, only=(2,))
    merge(bench, code=0)
    assert [row["id"] for row in bench.rows()] == [f"r{at}" for at in range(20)]
    assert not bench.errors_file.exists()


def test_input_is_read_through_other_file_systems(bench: Bench) -> None:
    bench.write(ROWS)
    want = whole(bench)
    bench.generate(source=f"file://{bench.input}", code=3)
    assert (bench.output.read_bytes(), bench.errors_file.read_bytes()) == want
    text = bench.generate("--overwrite", source=f"file://{bench.folder}/none.jsonl", code=2).err
    assert "no such input" in text
    assert "cannot open ftp://a/b" in bench.generate(source="ftp://a/b", code=2).err
