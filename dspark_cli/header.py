"""The first line of a journal: what the run is, checked against what it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_cli import backend
from dspark_cli.fingerprint import check_same_run, dspark_version, text_digest
from dspark_cli.journal import FORMAT, Journal
from dspark_cli.rows import RowRules
from dspark_cli.sampling import effective
from dspark_cli.sharding import Shard
from engine.config import EngineConfig
from engine.locate import checkpoint_digest

_LATE = ("dtype", "device")  # `auto` until the engine is there


def run_header(
    config: EngineConfig,
    rules: RowRules,
    template: str | None,
    shard: Shard | None,
    folder: Path,
    tokenizer: str,
) -> dict[str, Any]:
    """What a run is, as far as it is known before the engine is loaded.

    Args:
        config: The engine's settings.
        rules: What holds for every row.
        template: The chat template's text, None for the model's.
        shard: Which part of the input.
        folder: The target's.
        tokenizer: Its fingerprint.
    """
    draft = config.draft
    draft_folder = None if draft is None else backend.locate_checkpoint(draft, "draft")
    sampling = effective(rules.params)
    del sampling["max_tokens"]  # a larger limit only redoes rows that were cut
    return {
        "model": checkpoint_digest(folder),
        "model_name": config.model,
        "tokenizer": tokenizer,
        "draft": None if draft_folder is None else checkpoint_digest(draft_folder),
        "draft_name": draft,
        "num_speculative_tokens": config.num_speculative_tokens,
        "verify": config.verify,
        "dtype": config.dtype,
        "device": config.device,
        "chat": rules.chat,
        "chat_template": text_digest(template),
        "chat_template_kwargs": dict(rules.template_kwargs),
        **sampling,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "attention_parallel": config.attention_parallel,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "version": dspark_version(),
        **({} if shard is None else {"shard": str(shard)}),
    }


class Header:
    """A journal's, as a run opens and settles it.

    Args:
        journal: Whose.
        force: Go on although settings that decide outputs have changed.
        say: Told what has changed.
    """

    def __init__(self, journal: Journal, force: bool, say: Callable[[str], None]) -> None:
        self.journal = journal
        self._force = force
        self._say = say

    def open(self, now: dict[str, Any]) -> None:
        """Check the journal's run against this one, and note what changed."""
        journal = self.journal
        then = journal.header
        if journal.torn_bytes:
            self._say(
                f"the journal's last line was cut short ({journal.torn_bytes} bytes): its row runs "
                "again"
            )
        if journal.bad_lines:
            numbers = ", ".join(map(str, journal.bad_lines[:20]))
            self._say(f"{len(journal.bad_lines)} damaged lines in the journal: {numbers}")
        if then is not None and journal.has_completions:
            late = tuple(name for name in _LATE if now[name] == "auto")
            for note in check_same_run(then, now, force=self._force, skip=late):
                self._say(note)
            now = {**now, **{name: then[name] for name in late}}
            if len(journal):
                self._say(f"going on: {len(journal)} lines are in {journal.path}")
        self._write(now)

    def settle(self, settings: dict[str, Any]) -> None:
        """Fill in what `auto` became.

        Args:
            settings: `dtype` and `device` of the engine.
        """
        then = self.journal.header
        if then is None:
            raise ValueError("a journal begins with its header")
        found = {name: settings[name] for name in _LATE if settings[name] != "auto"}
        now = {**then, **found}
        new = tuple(name for name in _LATE if then[name] == "auto")
        if self.journal.has_completions:
            for note in check_same_run(then, now, force=self._force, skip=new):
                self._say(note)
        self._write(now)

    def _write(self, run: dict[str, Any]) -> None:
        if self.journal.header != run:
            self.journal.append({"type": "header", "format": FORMAT, "run": run})
