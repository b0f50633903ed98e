"""How tokens are drawn and when outputs end: options of every command that decodes as asked."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from dspark_cli.options import SAMPLING, option
from dspark_cli.parsers import sampling
from engine.errors import ConfigError, RequestError
from engine.request import SamplingParams

MaxTokens = Annotated[
    int,
    option(SAMPLING, "Output tokens of a row at most.", parser=sampling("max_tokens"), metavar="N"),
]
Temperature = Annotated[
    float,
    option(SAMPLING, "0 takes the most likely token.", parser=sampling("temperature"), metavar="T"),
]
TopP = Annotated[
    float,
    option(
        SAMPLING,
        "Most likely tokens up to this probability.",
        parser=sampling("top_p"),
        metavar="P",
    ),
]
TopK = Annotated[
    int,
    option(
        SAMPLING,
        "This many most likely tokens; 0 keeps all (so does -1).",
        parser=sampling("top_k"),
        metavar="N",
    ),
]
MinP = Annotated[
    float,
    option(
        SAMPLING,
        "Drop tokens below this share of the best.",
        parser=sampling("min_p"),
        metavar="P",
    ),
]
Seed = Annotated[
    int,
    option(
        SAMPLING,
        "Noise is keyed by seed, row id, sample and position.",
        parser=sampling("seed"),
        metavar="N",
    ),
]
Stop = Annotated[
    list[str] | None,
    option(SAMPLING, "End at this text, left out of the output; repeatable.", metavar="TEXT"),
]
StopTokenId = Annotated[
    list[int] | None,
    option(
        SAMPLING,
        "End at this token, kept in token_ids; repeatable.",
        parser=sampling("stop_token_ids"),
        metavar="ID",
    ),
]
IgnoreEos = Annotated[
    bool, option(SAMPLING, "Go on after the end token (for measurements).", "--ignore-eos")
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn and when outputs end, where a row does not say otherwise."""

    max_tokens: MaxTokens
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = 0
    stop: Stop = None
    stop_token_id: StopTokenId = None
    ignore_eos: IgnoreEos = False

    def params(self, **more: Any) -> SamplingParams:
        """As the engine takes it.

        Args:
            more: What the command sets by itself.

        Raises:
            ConfigError: One is out of range.
        """
        names = {field.name for field in fields(SamplingParams)}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name in names}
        given["stop"] = tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_id or ())
        try:
            return SamplingParams(**{**given, **more})
        except RequestError as error:
            raise ConfigError(f"sampling options: {error}", error.hint) from None
