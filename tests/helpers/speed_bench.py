"""SPEED-Bench files in the layouts found in the wild, with texts of our own."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evals.speed_bench.placeholders import MARKER

Row = dict[str, Any]

ROWS: list[Row] = [
    {
        "question_id": f"id-{n}",
        "category": category,
        "sub_category": sub,
        "turns": turns,
        "source": source,
        "src_id": str(n),
        "difficulty": "",
        "multiturn": len(turns) > 1,
    }
    for n, (category, sub, turns, source) in enumerate(
        [
            ("coding", "python", ["Add 2 and 3.", "Now add 4."], "own"),
            ("coding", "rust", ["Reverse a list é."], "own"),
            ("math", "sums", ["What is 7 * 6?", "And 7 * 7?", "And the sum?"], "own"),
            ("roleplay", "", ["You are a baker. What is for sale?"], "own"),
        ]
    )
]


def placeholder(n: int, source: str, src_id: str, rest: str = "", category: str = "qa") -> Row:
    """A row as published: the marker, and what the row itself holds of its prompt."""
    text = MARKER + (f"\n\n{rest}" if rest else "")
    return {
        "question_id": f"id-{n}",
        "category": category,
        "sub_category": "",
        "turns": [text],
        "source": source,
        "src_id": src_id,
        "difficulty": "",
        "multiturn": False,
    }


def write_lines(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Row]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def as_messages(rows: Sequence[Row]) -> list[Row]:
    made = []
    for row in rows:
        rest = {name: value for name, value in row.items() if name != "turns"}
        made.append(rest | {"messages": [{"role": "user", "content": t} for t in row["turns"]]})
    return made


def _speculators(folder: Path, rows: Sequence[Row], config: str) -> Path:
    by_file: dict[str, list[Row]] = {}
    for row in rows:
        name = row["category"] if config == "qualitative" else _tier_name(row)
        by_file.setdefault(f"{config}_{name}.jsonl", []).append({"turns": row["turns"][0]})
    for name, lines in by_file.items():
        write_lines(folder / name, lines)
    return folder


def _tier_name(row: Row) -> str:
    return f"{row['category']}__{row['sub_category']}"


def layouts(config: str = "qualitative") -> dict[str, Callable[[Path, Sequence[Row]], Path]]:
    """Layout -> writes rows into a folder, returns what a user would give."""
    return {
        "hub": lambda at, rows: write_parquet(at / config / "test-00000-of-00001.parquet", rows),
        "model-optimizer": lambda at, rows: write_parquet(at / config / "test.parquet", rows),
        "nemo-skills": lambda at, rows: write_lines(at / f"{config}.jsonl", as_messages(rows)),
        "vllm": lambda at, rows: write_lines(at / f"{config}.jsonl", as_messages(rows)).parent,
        "sglang": lambda at, rows: write_lines(at / f"{config}.jsonl", rows),
        "speculators": lambda at, rows: _speculators(at, rows, config),
    }
