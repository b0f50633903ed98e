"""Training of the demo's drafters on answers the target wrote itself."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from examples.demo import problems, tokens
from examples.demo.drafter import Drafter, DraftShape
from examples.demo.layers import Shape, TargetModel
from examples.demo.train_target import Schedule, optimizer

DISCOUNT = 0.85  # of a row's weight for each row before it in the draft block


@dataclass
class Rollouts:
    """Prompts with the target's answers, padded at the right."""

    ids: Tensor  # [n, length] int16
    prompt: Tensor  # [n] tokens of the prompt
    total: Tensor  # [n] tokens in all, EOS included


def _generate(
    model: Any, prompts: list[list[int]], new_tokens: int, *, sample: bool
) -> list[list[int]]:
    """Prompts with their answers, EOS included where it came."""
    longest = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[tokens.PAD] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, pad_token_id=tokens.PAD, **how
        )
    answers = out[:, longest:].tolist()
    ends = [a.index(tokens.EOS) + 1 if tokens.EOS in a else len(a) for a in answers]
    return [p + a[:end] for p, a, end in zip(prompts, answers, ends, strict=True)]


def make_rollouts(folder: Path, plan: dict[str, Any], device: str) -> Rollouts:
    """Half of the answers greedy, half sampled at temperature 1."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(plan["seed"])
    torch.manual_seed(plan["seed"])
    rows = problems.take(f"rollout-{plan['seed']}", plan["prompts"], held_out=False)
    prompts = [tokens.chat_prompt(tokenizer, tokens.wrap(r["question"], rng)) for r in rows]
    length = plan["length"]
    pairs: list[tuple[int, list[int]]] = []
    for sample, part in ((False, prompts[::2]), (True, prompts[1::2])):
        part.sort(key=len)
        for i in range(0, len(part), plan["batch"]):
            for whole in _generate(
                model, part[i : i + plan["batch"]], plan["new_tokens"], sample=sample
            ):
                if len(whole) <= length:
                    pairs.append((whole.index(tokens.ASSISTANT) + 1, whole))
    ids = torch.zeros(len(pairs), length, dtype=torch.int16)
    for i, (_, whole) in enumerate(pairs):
        ids[i, : len(whole)] = torch.tensor(whole, dtype=torch.int16)
    prompt = torch.tensor([n for n, _ in pairs])
    return Rollouts(ids, prompt, torch.tensor([len(w) for _, w in pairs]))


def load_target(folder: Path, shape: Shape, device: str) -> TargetModel:
    """The exported (bfloat16) weights as a frozen float32 module of our own."""
    model = TargetModel(shape)
    state = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
    return model.to(device).eval().requires_grad_(False)


def _mask(anchors: Tensor, gamma: int, length: int) -> Tensor:
    """[n, 1, anchors * gamma, length + anchors * gamma]: context before the anchor, own block."""
    rows = anchors.repeat_interleave(gamma, dim=1)
    positions = torch.arange(length, device=anchors.device)
    context = positions[None, None] < rows[:, :, None]
    block = torch.arange(rows.shape[1], device=anchors.device) // gamma
    own = (block[:, None] == block[None]).expand(len(rows), -1, -1)
    return torch.cat([context, own], dim=2)[:, None]


def _draft_logits(
    drafter: Drafter, target: TargetModel, hidden: Tensor, prev: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [n, anchors, gamma, vocab] given the true tokens before, and confidence logits."""
    base = target.logits(hidden)
    state, biases, features = drafter.markov_head.start(hidden[:, :, 0]), [], []
    for k in range(prev.shape[2]):
        state, bias, e = drafter.markov_head.step(state, prev[:, :, k], hidden[:, :, k])
        biases.append(bias)
        features.append(e)
    confidence = drafter.confidence_head(hidden, torch.stack(features, dim=2))
    return base.float() + torch.stack(biases, dim=2).float(), confidence.float()


def _loss(
    drafter: Drafter, target: TargetModel, ids: Tensor, ends: tuple[Tensor, Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """The loss, and the share of rows whose greedy draft is the target's choice, by row."""
    prompt, total = ends
    gamma, n = drafter.draft.gamma, len(ids)
    with torch.no_grad():
        final, taps = target(ids, drafter.draft.tap_ids)
        target_logits = target.logits(final).float()
    span = (total - 1 - prompt)[:, None]
    draw = torch.rand(n, count, device=ids.device)
    anchors = prompt[:, None] + (draw * span).long()
    at = anchors[:, :, None] + torch.arange(gamma, device=ids.device)
    ok = (at + 1 < total[:, None, None]).float()
    here = at.clamp(max=ids.shape[1] - 2)
    batch = torch.arange(n, device=ids.device)[:, None, None]
    prev, label = ids[batch, here], ids[batch, here + 1]
    want = target_logits[batch, here].softmax(dim=-1)

    rows = torch.full_like(at, tokens.MASK)
    rows[:, :, 0] = ids[batch[:, :, 0], anchors]
    mask = _mask(anchors, gamma, ids.shape[1])
    embedded = target.embed_tokens(rows.flatten(1))
    hidden = drafter.block(embedded, at.flatten(1), drafter.context(taps), mask)
    logits, confidence = _draft_logits(drafter, target, hidden.unflatten(1, (count, gamma)), prev)

    overlap = 1 - 0.5 * (logits.softmax(dim=-1) - want).abs().sum(dim=-1)
    hard = functional.cross_entropy(
        logits.flatten(0, 2), label.flatten(), reduction="none"
    ).view_as(ok)
    soft = -(want * logits.log_softmax(dim=-1)).sum(dim=-1)
    sure = functional.binary_cross_entropy_with_logits(
        confidence, overlap.detach().clamp(0, 1), reduction="none"
    )
    weight = ok * DISCOUNT ** torch.arange(gamma, device=ids.device)
    each = 0.2 * hard + 0.4 * soft + 1.0 * (1 - overlap) + 0.2 * sure
    right = (logits.argmax(dim=-1) == want.argmax(dim=-1)).float() * ok
    return (each * weight).sum() / weight.sum(), right.sum((0, 1)) / ok.sum((0, 1)).clamp(min=1)


def train_drafter(
    target: TargetModel, rollouts: Rollouts, shapes: tuple[Shape, DraftShape], plan: dict[str, Any]
) -> Drafter:
    """Train one drafter; ``plan`` is its entry of the recipe."""
    device = next(target.parameters()).device
    torch.manual_seed(plan["seed"])
    drafter = Drafter(*shapes).to(device)
    adam = optimizer(list(drafter.parameters()), plan["learning_rate"])
    schedule = Schedule(plan["steps"], plan["seconds"], plan["warmup"])
    ids, prompt, total = (t.to(device) for t in (rollouts.ids, rollouts.prompt, rollouts.total))
    while (factor := schedule.next()) is not None:
        pick = torch.randint(len(ids), (plan["rows"],), device=device)
        ends = (prompt[pick], total[pick])
        for group in adam.param_groups:
            group["lr"] = plan["learning_rate"] * factor
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, right = _loss(drafter, target, ids[pick].long(), ends, plan["anchors"])
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        adam.step()
        if schedule.step % plan["log_every"] == 0 or schedule.step == 3:
            shares = " ".join(f"{x:.3f}" for x in right.tolist())
            print(
                f"drafter step {schedule.step} loss {loss.item():.4f} right {shares}"
                f" at {schedule.elapsed():.0f} s",
                flush=True,
            )
    plan["steps_done"] = schedule.step
    plan["seconds_taken"] = round(schedule.elapsed(), 1)
    return drafter
