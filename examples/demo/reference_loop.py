"""A plain, slow loop of DSpark decoding for one request, to check others against.

Every round drafts a whole draft block, verifies all of it with one pass of the target over the
whole text, and accepts greedily. No cache: every round computes everything again. float32 on the
CPU, the target from the transformers library, the drafter from ``drafter.py``.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.demo.drafter import Drafter, load_drafter


@dataclass
class Trace:
    """One answer: its tokens (EOS included), and what each round did."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)  # kept tokens, bonus included
    accepted: list[int] = field(default_factory=list)  # drafts kept
    confidence: list[list[float]] = field(default_factory=list)  # logits, before the sigmoid
    margin: float = float("inf")  # smallest lead of a chosen token over the next best logit
    draft_margin: float = float("inf")  # the same of the drafted tokens


class ReferenceLoop:
    """A target and a drafter, or a target alone."""

    def __init__(self, target_folder: Path, drafter_folder: Path | None) -> None:
        from transformers import AutoModelForCausalLM

        self.target: Any = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
        self.target.eval()
        self.drafter = load_drafter(drafter_folder) if drafter_folder else None
        self.eos = self.target.generation_config.eos_token_id
        self._seen: dict[int, Tensor] = {}
        trunk = self.target.model
        for i, module in enumerate([trunk.embed_tokens, *trunk.layers]):
            module.register_forward_hook(self._watch(i - 1))

    def _watch(self, index: int) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            self._seen[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def _verify(self, ids: list[int]) -> Tensor:
        """Logits [tokens, vocab] of the target over the whole text; leaves the taps behind."""
        return self.target(input_ids=torch.tensor([ids]), use_cache=False).logits[0]

    @torch.inference_mode()
    def _draft(self, drafter: Drafter, ids: list[int], trace: Trace, mask_id: int) -> list[int]:
        """A draft block after ids, whose last token is the anchor; the taps end before it."""
        gamma, start = drafter.draft.gamma, len(ids) - 1
        taps = [self._seen[i][:, :start] for i in drafter.draft.tap_ids]
        rows = self.target.model.embed_tokens(torch.tensor([[ids[-1]] + [mask_id] * (gamma - 1)]))
        everything = torch.ones(1, 1, gamma, start + gamma, dtype=torch.bool)
        positions = torch.arange(start, start + gamma)[None]
        hidden = drafter.block(rows, positions, drafter.context(taps), everything)[0]
        base = self.target.lm_head(hidden)
        drafts, confidence, prev = [], [], ids[-1]
        state = drafter.markov_head.start(hidden[0])
        for k in range(gamma):
            state, bias, e = drafter.markov_head.step(state, torch.tensor(prev), hidden[k])
            confidence.append(drafter.confidence_head(hidden[k], e).item())
            prev, lead = _best(base[k] + bias)
            trace.draft_margin = min(trace.draft_margin, lead)
            drafts.append(prev)
        trace.confidence.append(confidence)
        return drafts

    def run(self, prompt_ids: list[int], max_new_tokens: int, mask_id: int) -> Trace:
        """Greedy answer. The first token comes from the prompt's own pass and is in no round."""
        trace, ids = Trace(list(prompt_ids)), list(prompt_ids)
        logits = self._verify(ids)
        fresh = [self._choose(logits[-1], trace)]
        while True:
            room = max_new_tokens - len(trace.output_ids)
            end = fresh.index(self.eos) + 1 if self.eos in fresh else len(fresh)
            kept = fresh[: min(end, room)]
            if trace.accepted:
                trace.acceptance_lengths.append(len(kept))
                trace.accepted[-1] = min(trace.accepted[-1], len(kept))  # nothing after EOS
            trace.output_ids += kept
            ids += kept
            if kept[-1] == self.eos or len(trace.output_ids) == max_new_tokens:
                return trace
            fresh = self._round(ids, trace, mask_id)

    def _round(self, ids: list[int], trace: Trace, mask_id: int) -> list[int]:
        """Accepted drafts and the bonus token."""
        drafts: list[int] = []
        if self.drafter is not None:
            drafts = self._draft(self.drafter, ids, trace, mask_id)
        logits = self._verify(ids + drafts)[len(ids) - 1 :]
        fresh: list[int] = []
        for k, row in enumerate(logits):
            fresh.append(self._choose(row, trace))
            if k == len(drafts) or fresh[k] != drafts[k]:
                break
        trace.accepted.append(len(fresh) - 1)
        return fresh

    @staticmethod
    def _choose(row: Tensor, trace: Trace) -> int:
        token, lead = _best(row)
        trace.margin = min(trace.margin, lead)
        return token


def _best(row: Tensor) -> tuple[int, float]:
    """The token with the largest logit, and its lead over the next."""
    best = row.topk(2)
    return int(best.indices[0]), float(best.values[0] - best.values[1])
