"""A tokenizer and an engine without weights: a request has one output, in any batch."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.config import EngineConfig
from engine.errors import CapacityError, CheckpointError, RequestError
from engine.request import Completion, FinishReason, Request, RequestFailure, Round, Timing
from engine.telemetry import EngineStats

EOS = 256
CONTEXT = 200


class FakeTokenizer:
    """Bytes of UTF-8 are ids; a chat is `role:content` in lines."""

    eos_token_id = EOS
    has_chat_template = True
    vocab_size = 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        if any("TEMPLATE_RAISES" in m["content"] for m in messages):
            raise ZeroDivisionError("in the template")
        head = "".join(f"[{k}={v}]" for k, v in (template_kwargs or {}).items())
        lines = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return f"{chat_template or ''}{head}{lines}assistant:"

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        return self.encode(self.render_chat(messages, template_kwargs, chat_template))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        return "fake"


def output_of(request: Request) -> tuple[list[int], FinishReason]:
    """What the fake model says: 1 to 40 letters keyed by prompt and noise key, then EOS."""
    params = request.params
    noise = request.noise_key if params.temperature else 0
    seed = repr((request.prompt_token_ids, noise, params.temperature)).encode()
    stream = hashlib.blake2b(seed, digest_size=64).digest()
    ids = [97 + byte % 26 for byte in stream[: 1 + stream[0] % 40]]
    if b"BREAKS" in bytes(t for t in request.prompt_token_ids if t < 256):
        ids[:0] = "\u2028é\u2029🙂\x85".encode()
    ids.append(EOS)
    if params.ignore_eos:
        ids = (ids[:-1] * params.max_tokens)[: params.max_tokens + 1]
    if len(ids) > params.max_tokens:
        return ids[: params.max_tokens], FinishReason.LENGTH
    return ids, FinishReason.STOP


class FakeEngine:
    """Finishes rows out of order, `max_num_seqs` at a time, a few tokens a step."""

    loads = 0
    """Engines made in this process."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str, int, int], None] | None = None,
        *,
        delay: float = 0.0,
    ) -> None:
        FakeEngine.loads += 1
        if "unloadable" in config.model:
            raise CheckpointError("weights are missing", "get them")
        if "crowded" in config.model:
            raise CapacityError("there is no room", "make some")
        self.config = config
        self.tokenizer = FakeTokenizer()
        self.stats = EngineStats(drafted_at=[0] * 7, accepted_at=[0] * 7)
        self.max_model_len = min(config.max_model_len or CONTEXT, CONTEXT)
        self.gamma = (config.num_speculative_tokens or 7) if config.draft is not None else 0
        self.limits = SimpleNamespace(
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs or 4,
            max_num_batched_tokens=config.max_num_batched_tokens or 512,
        )
        self.delay = delay
        if on_progress is not None:
            on_progress("load", 50, 100)
            on_progress("load", 100, 100)

    def validate(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise RequestError("too_long", "too long", "shorten it")
        if any(not 0 <= t < 257 for t in request.prompt_token_ids):
            raise RequestError("schema", "not in the vocabulary", "fix the ids")

    def follow(self, on_round: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def prepare(self, max_num_seqs: int | None = None) -> float | None:
        return None

    def run(self, requests: Iterable[Request | None]) -> Iterator[Completion | RequestFailure]:
        source = iter(requests)
        running: list[tuple[Request, int]] = []
        more = True
        while more or running:
            while more and len(running) < (self.config.max_num_seqs or 4):
                try:
                    request = next(source)
                except StopIteration:
                    more = False
                    break
                if request is None:
                    assert running, "the source waits for results, but nothing runs"
                    break
                try:
                    self.validate(request)
                except RequestError as error:
                    yield RequestFailure(
                        request=request,
                        kind=error.kind,
                        message=str(error),
                        retryable=False,
                        hint=error.hint,
                    )
                    continue
                running.append((request, 0))
                self.stats.prompt_tokens += len(request.prompt_token_ids)
            time.sleep(self.delay)
            running, ended = self._step(running)
            for request in ended:
                yield self._finish(request)

    def _step(
        self, running: list[tuple[Request, int]]
    ) -> tuple[list[tuple[Request, int]], list[Request]]:
        going: list[tuple[Request, int]] = []
        ended: list[Request] = []
        for request, done in running:
            if done + 8 >= len(output_of(request)[0]):
                ended.append(request)
            else:
                going.append((request, done + 8))
        return going, ended

    def _finish(self, request: Request) -> Completion | RequestFailure:
        prompt = bytes(t for t in request.prompt_token_ids if t < 256)
        for kind in ("oom", "engine"):
            marker = f"FAIL_{kind}".encode()
            if marker in prompt and not os.environ.get("FAKE_HEALED"):
                return RequestFailure(
                    request=request, kind=kind, message="as asked", retryable=kind == "oom"
                )
        if b"RAISE" in prompt:
            raise RuntimeError("the engine broke")
        ids, reason = output_of(request)
        self.stats.output_tokens += len(ids)
        rounds = self._rounds(len(ids)) if self.config.draft is not None else ()
        return Completion(
            request=request,
            token_ids=tuple(ids),
            text=self.tokenizer.decode(ids),
            finish_reason=reason,
            stop_reason=EOS if reason is FinishReason.STOP else None,
            num_cached_tokens=0,
            rounds=rounds,
            timing=Timing(0.0, ()),
        )

    def _rounds(self, tokens: int) -> tuple[Round, ...]:
        rounds = []
        left = tokens - 1
        while left > 0:
            committed = min(3, left)
            rounds.append(Round(drafted=7, accepted=committed - 1, committed=committed))
            self.stats.rounds += 1
            self.stats.drafted += 7
            self.stats.accepted += committed - 1
            self.stats.committed += committed
            for at in range(7):
                self.stats.drafted_at[at] += 1
                self.stats.accepted_at[at] += at < committed - 1
            left -= committed
        return tuple(rounds)


def locate(name: str, role: str) -> Path:
    """Any folder will do."""
    path = Path(name)
    if not path.is_dir():
        raise CheckpointError(f"no such checkpoint: {name}", "check the name")
    return path


def install() -> None:
    """Be the backend of this process, from now on."""
    from dspark_cli import backend

    backend.locate_checkpoint = locate  # type: ignore[assignment]
    backend.load_tokenizer = lambda folder: FakeTokenizer()  # type: ignore[assignment, return-value]
    backend.check_checkpoints = lambda config: None
    delay = float(os.environ.get("FAKE_DELAY", "0"))
    backend.load_engine = partial(FakeEngine, delay=delay)  # type: ignore[assignment]


def replica() -> None:
    """A replica's process, with the fake engine."""
    from dspark_cli import replica

    install()
    replica.main()
