"""Reads config.json strictly: right types, named errors, and no key dropped by accident.

A key that changes what the network computes and is not understood here is an error. Keys in
`INERT_KEYS` describe training, bookkeeping or generation defaults and never change a forward pass.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

# Bookkeeping that libraries write about themselves.
_BOOKKEEPING = """
    transformers_version torch_dtype dtype auto_map tokenizer_class name_or_path model_name
    transformers.js_config unsloth_version unsloth_fixed is_llama_config torchscript
    base_model_name_or_path
"""
_TRAINING = """
    initializer_range attention_dropout hidden_dropout resid_dropout embd_dropout dropout use_cache
    gradient_checkpointing chunk_size_feed_forward problem_type task_specific_params finetuning_task
    id2label label2id num_labels tf_legacy_loss use_bfloat16 pretraining_tp output_attentions
    output_hidden_states output_scores return_dict return_dict_in_generate is_decoder
    tie_encoder_decoder cross_attention_hidden_size
"""
# The token ids that matter are read by name.
_TOKENS = """
    pad_token_id unk_token_id sep_token_id bos_token_id eos_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id prefix
"""
# Generation defaults that transformers 4.x kept in config.json; sampling is the caller's.
_GENERATION = """
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
INERT_KEYS = frozenset(" ".join((_BOOKKEEPING, _TRAINING, _TOKENS, _GENERATION)).split())

_MISSING = object()


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is absent, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "give a Hugging Face checkpoint folder"
        raise CheckpointError(f"{path.parent} has no {path.name}", hint) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}", "download the checkpoint again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(value).__name__}",
            "download the checkpoint again",
        )
    return value


class ConfigFields:
    """One JSON object read field by field; `finish` refuses what nobody read.

    Args:
        values: The object.
        where: Names the object in errors, e.g. the path of its file.
        defaults: Values of keys the writer leaves out when they are its library's defaults.
    """

    def __init__(
        self, values: dict[str, Any], where: str, defaults: dict[str, Any] | None = None
    ) -> None:
        self.where = where
        self._values = values
        self._defaults = defaults or {}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Is the key written, with a value other than null?"""
        return self._values.get(key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as JSON gave it; null and absent are the same."""
        self._read.add(key)
        value = self._values.get(key)
        if value is None:
            value = self._defaults.get(key)
        return default if value is None else value

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; without a default the key must be there."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"must be an integer >= {minimum}, got {value!r}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """An integer, or None when absent."""
        return None if self.raw(key) is None else self.integer(key, minimum=minimum)

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A number above zero."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, f"must be a number > 0, got {value!r}")
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """A JSON boolean."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A JSON string."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r}")
        return value

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """A non-empty list of integers of at least `minimum`."""
        value = self._required(key, _MISSING)
        good = isinstance(value, list) and all(
            isinstance(v, int) and not isinstance(v, bool) and v >= minimum for v in value
        )
        if not good or not value:
            raise self.error(key, f"must be a list of integers >= {minimum}, got {value!r}")
        return tuple(value)

    def expect(self, key: str, wanted: Any, why: str) -> None:
        """Refuse any value but `wanted`; absent is fine."""
        value = self.raw(key, wanted)
        if value != wanted:
            raise self.error(key, f"is {value!r}; only {wanted!r} is supported", why)

    def error(self, key: str, problem: str, hint: str = "") -> CheckpointError:
        """An error that names the file and the key."""
        return CheckpointError(
            f"{self.where}: {key} {problem}", hint or f"fix {key} in the checkpoint's config.json"
        )

    def finish(self, also_inert: Iterable[str] = ()) -> None:
        """Refuse keys that nobody read and that are not known to be inert.

        Args:
            also_inert: Keys inert in this format only.
        """
        known = self._read | INERT_KEYS | set(also_inert)
        unknown = sorted(
            key
            for key, value in self._values.items()
            if value is not None and key not in known and not key.startswith("_")
        )
        if unknown:
            shown = ", ".join(f"{key}={_short(self._values[key])}" for key in unknown)
            raise CheckpointError(
                f"{self.where}: unknown keys that may change the computation: {shown}",
                "use a checkpoint of a supported architecture; remove keys known to be inert",
            )

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is _MISSING:
            raise self.error(key, "is missing", f"add {key} to the checkpoint's config.json")
        return value


def _short(value: Any, limit: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
