"""The real pair of the reference run: SmolLM2-135M-Instruct and a drafter trained for it.

Its files are not part of the project. They are looked for in $DSPARK_FIXTURES, else beside the
checkout in ../shared/fixtures; where there are none, these tests are skipped and say so.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIXTURES = Path(os.environ.get("DSPARK_FIXTURES", ROOT.parent / "shared" / "fixtures"))


@dataclass(frozen=True)
class RealPair:
    target: Path
    draft: Path
    questions: list[dict[str, Any]]


@pytest.fixture(scope="session")
def real_pair(pytestconfig: pytest.Config) -> RealPair:
    prepare = FIXTURES / "prepare_smollm2.py"
    if not prepare.exists():
        pytest.skip(f"no reference model: {prepare} does not exist")
    cache = pytestconfig.cache
    assert cache is not None
    target = Path(cache.mkdir("smollm2"))
    if not (target / "model.safetensors").exists():
        subprocess.run([sys.executable, str(prepare), str(target)], check=True)
    reference = FIXTURES / "reference" / "smollm2_markov_greedy.json"
    return RealPair(target, FIXTURES / "drafter_smollm2_markov", json.loads(reference.read_text()))
