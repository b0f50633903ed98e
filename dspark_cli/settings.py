"""All options of `dspark generate` in one place, and the engine's settings they mean."""

import json
from dataclasses import dataclass
from typing import Any

from dspark_cli import options
from dspark_cli.jsonl import loads
from dspark_cli.rows import RowRules
from engine.config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.request import SamplingParams
from engine.text import clashing_names


@dataclass(frozen=True)
class GenerateOptions:
    """The command's parameters: a field is an option, its type says how it is spelled."""

    input: options.Input
    model: options.Model
    output: options.Output = None
    passthrough: options.Passthrough = False
    limit: options.Limit = None
    dry_run: options.DryRun = False
    chat: options.Chat = False
    chat_template: options.ChatTemplate = None
    chat_template_kwargs: options.ChatTemplateKwargs = None
    device: options.Device = options.DeviceName.auto
    dtype: options.DType = options.DTypeName.auto
    max_model_len: options.MaxModelLen = None
    draft: options.Draft = None
    num_speculative_tokens: options.Gamma = None
    compare_plain: options.ComparePlain = False
    max_tokens: options.MaxTokens = 1024
    temperature: options.Temperature = 0.0
    top_p: options.TopP = 1.0
    top_k: options.TopK = 0
    min_p: options.MinP = 0.0
    seed: options.Seed = 0
    stop: options.Stop = None
    stop_token_id: options.StopTokenId = None
    ignore_eos: options.IgnoreEos = False
    n: options.N = 1
    max_num_seqs: options.MaxNumSeqs = None
    max_num_batched_tokens: options.MaxNumBatchedTokens = None
    gpu_memory_utilization: options.GpuMemoryUtilization = EngineConfig.gpu_memory_utilization
    kv_cache_memory: options.KvCacheMemory = None
    enable_prefix_caching: options.PrefixCaching = EngineConfig.enable_prefix_caching
    threads: options.Threads = None
    resume: options.Resume = True
    force_resume: options.ForceResume = False
    rerun: options.RerunRows = None
    overwrite: options.Overwrite = False
    grace: options.Grace = 10.0
    metrics_json: options.MetricsJson = None
    progress_file: options.ProgressFile = None
    show: options.Show = 0
    quiet: options.Quiet = False
    debug: options.Debug = False

    def draft_name(self) -> str | None:
        """The drafter to use: `demo` brings its own, `none` forbids one."""
        if self.draft is not None:
            return None if self.draft == "none" else self.draft
        return "demo" if self.model == "demo" else None

    def engine_config(self) -> EngineConfig:
        """The engine's settings.

        Raises:
            ConfigError: Two of them contradict each other.
        """
        return EngineConfig(
            model=self.model,
            draft=self.draft_name(),
            num_speculative_tokens=self.num_speculative_tokens,
            device=self.device.value,
            dtype=self.dtype.value,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_bytes=self.kv_cache_memory,
            enable_prefix_caching=self.enable_prefix_caching,
            threads=self.threads,
        )

    def rules(self) -> RowRules:
        """What holds for every row that does not say otherwise.

        Raises:
            ConfigError: A sampling option is out of range, or --chat-template-kwargs is not JSON.
        """
        try:
            params = SamplingParams(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=self.seed,
                max_tokens=self.max_tokens,
                stop=tuple(self.stop or ()),
                stop_token_ids=tuple(self.stop_token_id or ()),
                ignore_eos=self.ignore_eos,
            )
        except RequestError as error:
            raise ConfigError(f"sampling options: {error}", error.hint) from None
        return RowRules(
            params=params,
            n=self.n,
            chat=self.chat,
            template_kwargs=self._template_kwargs(),
            passthrough=self.passthrough,
        )

    def template_text(self) -> str | None:
        """What --chat-template holds.

        Raises:
            ConfigError: It cannot be read.
        """
        if self.chat_template is None:
            return None
        try:
            return self.chat_template.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read --chat-template {self.chat_template}: {error}"
            ) from None

    def check(self) -> list[str]:
        """Refuse what contradicts itself before anything is loaded.

        Returns:
            What is allowed but may not be what was meant.

        Raises:
            ConfigError: A combination makes no sense.
        """
        contradictions = (
            *self._empty_names(),
            (self.output is None and not self.dry_run, "no --output", "add -o OUT.jsonl, or -o -"),
            (self.overwrite and self.rerun, "--overwrite leaves nothing to --rerun", "drop one"),
            (not self.resume and self.rerun, "--no-resume leaves nothing to --rerun", "drop one"),
            (
                not self.resume and self.force_resume,
                "--no-resume and --force-resume contradict each other",
                "drop one",
            ),
            (
                self.compare_plain and self.draft_name() is None,
                "--compare-plain needs a drafter to compare with",
                "give --draft",
            ),
            (
                self.output == "-" and (self.rerun or self.overwrite or self.force_resume),
                "-o - keeps no journal: --rerun, --overwrite and --force-resume need a file",
                "write to a file",
            ),
            (
                self.output == "-" and self.show > 0,
                "--show repeats what -o - prints",
                "drop --show",
            ),
        )
        for wrong, message, hint in contradictions:
            if wrong:
                raise ConfigError(message, hint)
        return self._notes()

    def _empty_names(self) -> list[tuple[bool, str, str]]:
        """Names that came out empty, as those of unset shell variables do."""
        names: tuple[tuple[str, str | None], ...] = (
            ("INPUT", self.input),
            ("--output", self.output),
            ("--model", self.model),
            ("--draft", self.draft),
        )
        return [
            (
                value is not None and not value.strip(),
                f"{name} is empty: {value!r}",
                "give a name; is a shell variable unset?",
            )
            for name, value in names
        ]

    def _notes(self) -> list[str]:
        notes = []
        shaped = self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0
        if self.temperature == 0.0 and shaped:
            notes.append(
                "--top-p, --top-k and --min-p change nothing at --temperature 0 (only rows with "
                "their own temperature)"
            )
        if self.temperature == 0.0 and self.n > 1:
            notes.append(f"--n {self.n} at --temperature 0 makes {self.n} equal completions a row")
        if self.draft_name() is None:
            notes.append("no drafter: plain decoding, one token a step")
        return notes

    def _template_kwargs(self) -> dict[str, Any]:
        if self.chat_template_kwargs is None:
            return {}
        try:
            found = loads(self.chat_template_kwargs.encode("utf-8", "surrogateescape"))
        except RequestError as error:
            hint = "write it as " + json.dumps({"enable_thinking": False})
            raise ConfigError(f"--chat-template-kwargs: {error}", hint) from None
        if clash := clashing_names(found):
            raise ConfigError(
                f"--chat-template-kwargs may not name {', '.join(clash)}: the template is given "
                "these already",
                "leave them out",
            )
        return found
