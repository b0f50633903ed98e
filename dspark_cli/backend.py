"""The only way from the command line to the engine; tests put a fake engine in its place."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dspark_cli.interrupt import held_back
from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.kernel_bench.bench import Bench
    from engine.text import Tokenizer


def locate_checkpoint(name: str, role: Literal["target", "draft"]) -> Path:
    """Folder of a checkpoint given as a path, a Hub id or `demo`."""
    from engine.locate import locate

    return locate(name, role)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """The target's tokenizer, without its weights."""
    from engine.text import Tokenizer

    return Tokenizer.load(folder)


def check_checkpoints(config: EngineConfig) -> None:
    """Refuse what `load_engine` would refuse, from configs and headers alone."""
    from engine.worker import check

    check(config)


def load_engine(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> "Engine":
    """An engine with its weights."""
    with held_back():
        from engine.engine import Engine
        from engine.garbage import settle

    engine = Engine(config, on_progress=on_progress)
    settle(engine.runner.rows.device)
    return engine


def kernel_bench(config: EngineConfig, **sizes: Any) -> "Bench":
    """Each op at the shapes of a model; `sizes` are fields of engine.kernel_bench.bench.Sizes."""
    from engine.kernel_bench.bench import Sizes, prepare

    return prepare(config, Sizes(**sizes))
