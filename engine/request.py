"""What a caller asks for and gets back; host data only."""

import hashlib
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from engine.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Beyond these, logits / temperature leaves float32, or every token is as likely as any other."""


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token."""

    LENGTH = "length"
    """`max_tokens`, or the end of the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Per-request decoding choices; `temperature` 0 is greedy.

    The target's distribution is shaped in this order: temperature, top-k, top-p, min-p.

    Raises:
        RequestError: A value is out of range (kind `schema`).
    """

    temperature: float = 0.0
    """0, or in [0.001, 1000]; exactly 0 takes the most likely token, ties to the lowest id."""

    top_p: float = 1.0
    """(0, 1]; smallest set of most likely tokens whose probability reaches this."""

    top_k: int = 0
    """[0, 2**31); keep this many most likely tokens; 0 keeps all."""

    min_p: float = 0.0
    """[0, 1]; drop tokens less likely than this share of the most likely one."""

    seed: int = 0
    """[0, 2**63); noise is keyed by (seed, request id, sample, position)."""

    max_tokens: int = 1024
    """[1, 2**31); the context may end earlier."""

    stop: tuple[str, ...] = ()
    """Strings that end the output; the text is cut before the match."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the checkpoint's EOS; kept in token_ids."""

    ignore_eos: bool = False
    """Go on after EOS (for measurements)."""

    def __post_init__(self) -> None:
        """Reject what cannot be sampled."""
        bounds = (
            (
                "temperature",
                self.temperature == 0.0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE,
                f"0 (greedy) or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]",
            ),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", 0 <= self.top_k <= MAX_COUNT, "in [0, 2**31) (0 keeps all)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("seed", 0 <= self.seed <= MAX_SEED, "in [0, 2**63)"),
            ("max_tokens", 1 <= self.max_tokens <= MAX_COUNT, "in [1, 2**31)"),
            ("stop", all(self.stop), "without empty strings"),
            ("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "token ids >= 0"),
        )
        for name, ok, want in bounds:
            if not ok:
                raise RequestError(
                    "schema", f"{name} must be {want}, got {getattr(self, name)!r}", f"fix {name}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion to make.

    `(request_id, sample_index)` names it: unique in a run, and part of the noise key, so that the
    same request gives the same output in any batch, order or process.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample_index: int = 0

    @property
    def noise_key(self) -> int:
        """64 bits, as a signed int64: a hash of (seed, request id, sample index)."""
        text = f"{self.params.seed}\0{self.sample_index}\0{self.request_id}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for another process."""
        # not asdict: it would copy the prompt token by token
        return {**_fields(self), "params": _fields(self.params)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Request":
        """What `to_json` gave, back."""
        params = dict(value["params"])
        for name in ("stop", "stop_token_ids"):
            params[name] = tuple(params[name])
        ids = tuple(value["prompt_token_ids"])
        return cls(**{**value, "prompt_token_ids": ids, "params": SamplingParams(**params)})


def _fields(made: Any) -> dict[str, Any]:
    return {f.name: getattr(made, f.name) for f in fields(made)}


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-verify-accept round of one request, after cutting at the end of the sequence."""

    drafted: int
    """Draft tokens the target checked."""

    accepted: int
    """Draft tokens kept, in [0, drafted]."""

    committed: int
    """Tokens kept: `accepted`, plus 1 for the bonus token unless the cut removed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A finished request. Ids, text and rounds all describe the kept tokens."""

    request: Request
    token_ids: tuple[int, ...]
    """The output; ends with the EOS or stop token when one ended it."""

    text: str
    """`token_ids` as text without special tokens, cut before the stop string."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or token id that ended it; None for `length`."""

    num_cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache at first admission."""

    rounds: tuple[Round, ...]
    """One entry a draft round; empty without a draft. The first token comes from prefill."""

    timing: "Timing"


@dataclass(frozen=True, slots=True)
class Timing:
    """When a request's tokens came: seconds on the clock of time.perf_counter."""

    admitted: float
    """First given a row."""

    commits: tuple[tuple[float, int], ...]
    """(time, tokens kept) of each step that gave it tokens, the prefill's first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFailure:
    """A request that could not be finished; the others went on."""

    request: Request
    kind: str
    """`too_long`, `unsupported`, `empty`, `schema`, `oom` or `engine`."""

    message: str
    retryable: bool
    """True when the same request may succeed on another run."""

    hint: str = ""
    """What to do about it, as DSparkError's."""
