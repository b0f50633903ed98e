"""Which networks an engine has: parsed, checked against each other, and read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.locate import locate
from engine.measurements import pair_fingerprint
from engine.models import families
from engine.models.draft_config import parse_draft
from engine.models.interface import AnyDraft, AnyTarget, Draft, Target
from engine.models.layers import Placement
from engine.models.loader import Checkpoint
from engine.models.pair import check_pair, resolve_num_speculative_tokens
from engine.models.shapes import draft_shape, is_shape, random_weights, target_shape
from engine.models.target_config import parse_target
from engine.text import Tokenizer

Progress = Callable[[str, int, int], None]


def ignore_progress(_phase: str, _done: int, _total: int) -> None:
    """Where nobody watches."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Checkpoints parsed and checked against each other; nothing loaded yet."""

    target_folder: Path | None
    """None: random weights."""

    draft_folder: Path | None
    target: AnyTarget
    draft: AnyDraft | None
    num_speculative_tokens: int

    @property
    def most_queries(self) -> int:
        """Tokens of a request that one round may write."""
        # verification writes the anchor and G drafts, a fill-in block as many
        return 1 if self.draft is None else self.num_speculative_tokens + 1

    @property
    def specs(self) -> tuple[AnyTarget | AnyDraft, ...]:
        """Of the networks there are."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def fingerprint(self, config: EngineConfig) -> dict[str, str]:
        """Of the pair, for files of measurements."""
        return pair_fingerprint(
            config, self.target_folder, self.draft_folder, self.num_speculative_tokens
        )

    def lookahead(self, *, overlapped: bool) -> int:
        """Positions past the confirmed ones that may be written before the next confirmation."""
        # overlapped, one round's result is still on its way when the next is launched
        return self.most_queries * (2 if overlapped else 1)


def plan_checkpoints(config: EngineConfig) -> tuple[Plan, Tokenizer]:
    """Find and parse both checkpoints; refuse a pair that does not belong together."""
    if is_shape(config.model):
        return _plan_shapes(config)
    target_folder = locate(config.model, "target")
    # the config first: a drafter given as the model has no tokenizer, and is told so better
    target = parse_target(target_folder)
    tokenizer = Tokenizer.load(target_folder)
    if config.draft is None:
        return Plan(target_folder, None, target, None, 0), tokenizer
    draft_folder = locate(config.draft, "draft")
    draft = parse_draft(draft_folder)
    families.check_family(target, draft)
    own = Tokenizer.load(draft_folder) if (draft_folder / "tokenizer.json").exists() else None
    check_pair(target, draft, tokenizer, own)
    gamma = resolve_num_speculative_tokens(draft, config.num_speculative_tokens)
    return Plan(target_folder, draft_folder, target, draft, gamma), tokenizer


def _plan_shapes(config: EngineConfig) -> tuple[Plan, Tokenizer]:
    """Random weights; text goes through the demo's tokenizer, which any vocabulary holds."""
    target = target_shape(config.model)
    tokenizer = Tokenizer.load(locate("demo", "target"))
    if config.draft is None:
        return Plan(None, None, target, None, 0), tokenizer
    if config.draft != config.model:
        raise ConfigError(
            f"--draft {config.draft} has no random weights for --model {config.model}",
            hint=f"use --draft {config.model}",
        )
    draft = draft_shape(config.draft)
    gamma = resolve_num_speculative_tokens(draft, config.num_speculative_tokens)
    return Plan(None, None, target, draft, gamma), tokenizer


def load_networks(
    plan: Plan,
    at: Placement,
    positions: int,
    on_progress: Progress,
    checkpoint: type[Checkpoint] = Checkpoint,
) -> tuple[Target, Draft | None]:
    """Read the weights, or make them up."""
    if plan.target_folder is None:
        made = random_weights(plan.target, 0)
        target = families.build_target(plan.target, made, at, positions)
        if plan.draft is None:
            return target, None
        made = random_weights(plan.draft, 1)
        return target, families.build_draft(plan.draft, made, target, at, positions)
    with checkpoint(plan.target_folder, on_progress=on_progress) as weights:
        target = families.build_target(plan.target, weights, at, positions)
        if plan.target.tie_embeddings:
            rows = at.share.even(plan.target.vocab_size, dim=0)
            weights.check_copy("lm_head.weight", of="model.embed_tokens.weight", part=rows)
        weights.finish(partial(families.belongs_elsewhere, plan.target))
    if plan.draft is None or plan.draft_folder is None:
        return target, None
    with checkpoint(plan.draft_folder, on_progress=on_progress) as weights:
        draft = families.build_draft(plan.draft, weights, target, at, positions)
        weights.finish(partial(families.belongs_elsewhere, plan.draft))
    return target, draft
