"""README names what is there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tree_lists_every_module() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    tree = text[text.index("## The tree") : text.index("## Develop")]
    listed = {
        line.split()[0] for line in tree.splitlines() if line[:3].strip() and line.startswith("  ")
    }
    for top in ("dspark_cli", "engine", "evals"):
        files = {p.relative_to(ROOT / top).as_posix() for p in (ROOT / top).rglob("*.py")}
        modules = {f for f in files if Path(f).name not in ("__init__.py", "__main__.py")}
        assert modules <= listed, f"README lacks {sorted(modules - listed)}"
    for name in listed:
        assert any(
            (ROOT / top / name).exists() for top in ("dspark_cli", "engine", "evals", "examples")
        ), f"README lists {name}, which is not there"


def test_the_python_example_runs_and_says_what_it_says() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.rstrip().endswith("#### 5")
