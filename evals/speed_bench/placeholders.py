"""Rows of SPEED-Bench whose text is not in the file: finding them, and what would fill them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MARKER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""What the published files hold where a text may not be passed on; what follows it, if anything,
is the row's own prompt with holes such as `{article}`."""

_HOLE = re.compile(r"\{article\}")


@dataclass(frozen=True, slots=True)
class Source:
    """A data set that SPEED-Bench takes texts from."""

    name: str
    """As `--source` calls it."""

    mark: str
    """Found in the `source` field of its rows."""

    card: str
    """Where its terms are."""

    file: str
    """What to get from it; "" if only the official script can build its rows."""

    gated: bool = False


def _hub(name: str) -> str:
    return f"https://huggingface.co/datasets/{name}"


SOURCES = (
    Source("hle", "cais/hle", _hub("cais/hle"), "the test split (id, question)", gated=True),
    Source(
        "cnn-dailymail",
        "cnn_dailymail",
        _hub("abisee/cnn_dailymail"),
        "the test split of 3.0.0 (id, article)",
    ),
    Source(
        "livecodebench",
        "livecodebench/code_generation_lite",
        _hub("livecodebench/code_generation_lite"),
        "test.jsonl to test6.jsonl (question_id, question_content, starter_code)",
    ),
    Source(
        "code-contests",
        "deepmind/code_contests",
        _hub("deepmind/code_contests"),
        "the test split (name, description)",
    ),
    Source(
        "mt-bench-101",
        "mtbench101/mt-bench-101",
        "https://github.com/mtbench101/mt-bench-101",
        "mtbench101.jsonl (history)",
    ),
    Source(
        "opus-100",
        "Helsinki-NLP/opus-100",
        _hub("Helsinki-NLP/opus-100"),
        "the test split of each language pair, as opus-100:PAIR=FILE (translation)",
    ),
    Source("chatrag-bench", "nvidia/ChatRAG-Bench", _hub("nvidia/ChatRAG-Bench"), ""),
    Source("mmlu-pro", "TIGER-Lab/MMLU-Pro", _hub("TIGER-Lab/MMLU-Pro"), ""),
    Source("rolebench", "ZenMoore/RoleBench", _hub("ZenMoore/RoleBench"), ""),
    Source("coser", "Neph0s/CoSER", _hub("Neph0s/CoSER"), ""),
    Source("bamboo", "RUCAIBox/BAMBOO", "https://github.com/RUCAIBox/BAMBOO", ""),
    Source("ada-leval", "AdaLEval/", "https://github.com/open-compass/Ada-LEval", ""),
)

OFFICIAL = (
    "python prepare_data.py --dataset speed --config all   (examples/specdec_bench of "
    "NVIDIA's Model-Optimizer; needs the network, and a Hub login for gated sources)"
)
"""The command that builds every row."""


def is_placeholder(turns: Sequence[str]) -> bool:
    """Is the text of these turns missing, or only partly there?"""
    return any(MARKER in turn or _HOLE.search(turn) for turn in turns)


def source_of(field: str) -> Source | None:
    """The data set a row's `source` field means; None if it is not a known one."""
    return next((s for s in SOURCES if s.mark.lower() in field.lower()), None)


def source_name(field: str) -> str:
    """Its name, or the field itself."""
    known = source_of(field)
    return known.name if known is not None else field or "unknown"
