"""What a run was, so that a resumed one is the same run."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dspark_cli.journal import digest
from engine.errors import ConfigError

SAMPLING_OF_ROWS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
"""What rows may set themselves; a row for which one changes is another row."""

# A difference in these makes other outputs; in the others it makes the same ones, or about.
DECISIVE = (
    "model",
    "tokenizer",
    "dtype",
    "chat",
    "chat_template",
    "chat_template_kwargs",
    *SAMPLING_OF_ROWS,
)
NOTED = (
    "draft",
    "num_speculative_tokens",
    "verify",
    "device",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
    "attention_parallel",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "version",
)

SPECULATIVE = ("draft", "num_speculative_tokens", "verify", "max_model_len")
"""Of NOTED: greedy text stays, sampled tokens, statistics and which rows are too long may not."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that is not what it was."""

    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        then, now = ("not given" if x is None else repr(x) for x in (self.then, self.now))
        return f"{self.name.replace('_', '-')}: {then} then, {now} now"


def dspark_version() -> str:
    """The installed version."""
    try:
        return version("dspark")
    except PackageNotFoundError:  # run from a source folder
        return "0+unknown"


def text_digest(text: str | None) -> str | None:
    """Short name of a text."""
    return None if text is None else digest(text)[:16]


def changes(then: dict[str, Any], now: dict[str, Any], names: tuple[str, ...]) -> list[Change]:
    """Settings among `names` that differ."""
    differ = [name for name in names if then.get(name) != now.get(name)]
    return [Change(name, _shown(then, name), _shown(now, name)) for name in differ]


def _shown(run: dict[str, Any], name: str) -> Any:
    """A setting for people: a checkpoint's digest alone tells them nothing."""
    value, called = run.get(name), run.get(f"{name}_name")
    return value if value is None or called is None else f"{called} ({value})"


def check_same_run(
    then: dict[str, Any], now: dict[str, Any], *, force: bool, skip: tuple[str, ...] = ()
) -> list[str]:
    """Compare a journal's run with this one.

    Args:
        then: The journal's header.
        now: This run.
        force: Go on in spite of decisive differences.
        skip: Settings not known yet.

    Returns:
        What to tell the user.

    Raises:
        ConfigError: A decisive setting differs; all that differ are named.
    """
    names = tuple(name for name in DECISIVE if name not in skip)
    decisive = changes(then, now, names)
    if decisive and not force:
        raise ConfigError(
            "the output was begun with other settings: " + "; ".join(str(c) for c in decisive),
            "use the same settings, another -o, --overwrite to start over, or --force-resume to "
            "keep the finished rows (rows whose own sampling changed run again)",
        )
    noted = changes(then, now, tuple(name for name in NOTED if name not in skip))
    return [f"changed since the output was begun: {change}" for change in decisive + noted]
