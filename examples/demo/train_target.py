"""Training of the demo's target: a small Qwen3 on stories, packed into rows."""

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from examples.demo import problems, tokens
from examples.demo.layers import Shape, TargetModel

PLAIN_SHARE = 0.04  # documents without the chat template
QUESTION_WEIGHT = 0.15  # of a question token in the loss; an answer token has 1


def _pack_shard(job: tuple[str, int, int, int]) -> np.ndarray:
    """Rows [n, 2, length] of one worker: tokens, and what they belong to."""
    folder, seed, count, length = job
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    rng = random.Random(f"pack-{seed}")
    stream = problems.problems(f"train-{seed}", held_out=False)
    open_rows: list[tokens.Document] = []
    full: list[tokens.Document] = []
    for _ in range(count):
        if rng.random() < PLAIN_SHARE:
            shots = [next(stream) for _ in range(rng.randint(1, 6))]
            document = tokens.plain_document(tokenizer, shots, rng)[:length]
        else:
            document = tokens.chat_document(tokenizer, next(stream), rng)
        place = next((r for r in open_rows if len(r) + len(document) <= length), None)
        if place is None:
            open_rows.append(list(document))
            if len(open_rows) > 24:
                full.append(open_rows.pop(0))
        else:
            place.extend(document)
    out = np.zeros((len(full), 2, length), dtype=np.int16)
    for i, row in enumerate(full):
        out[i, :, : len(row)] = np.array(row, dtype=np.int16).T
    return out


def training_rows(folder: Path, documents: int, length: int, shards: int, seed: int) -> np.ndarray:
    """All rows, from several processes. The result does not depend on how many run at once."""
    jobs = [(str(folder), seed * 1000 + i, documents // shards, length) for i in range(shards)]
    workers = min(shards, multiprocessing.cpu_count())
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return np.concatenate(pool.map(_pack_shard, jobs, chunksize=1))


class Schedule:
    """Warm-up, then a cosine to zero over the steps or over the time limit, what ends first."""

    def __init__(self, steps: int, seconds: float, warmup: int) -> None:
        self.steps, self.seconds, self.warmup = steps, seconds, warmup
        self.step = 0
        self.began: float | None = None

    def elapsed(self) -> float:
        """Seconds since the third step: compiling does not count."""
        return time.monotonic() - self.began if self.began is not None else 0.0

    def progress(self) -> float:
        return max(self.step / self.steps, self.elapsed() / self.seconds)

    def next(self) -> float | None:
        """Factor of the learning rate for the next step, or None at the end."""
        done = self.progress()
        if done >= 1:
            return None
        self.step += 1
        if self.step == 3:
            self.began = time.monotonic()
        return min(1.0, self.step / self.warmup) * (0.5 + 0.5 * float(np.cos(np.pi * done)))


def optimizer(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=fused)


def _loss(model: TargetModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted loss, and the mean loss of answer tokens."""
    ids, kind = rows[:, 0].long(), rows[:, 1, 1:].reshape(-1)
    hidden, _ = model(ids)
    logits = model.logits(hidden[:, :-1]).float()
    each = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1), reduction="none")
    answer = (kind == tokens.ANSWER).float()
    weight = answer + QUESTION_WEIGHT * (kind == tokens.QUESTION).float()
    return (each * weight).sum() / weight.sum(), ((each * answer).sum() / answer.sum()).detach()


def train_target(rows: np.ndarray, shape: Shape, plan: dict[str, Any], device: str) -> TargetModel:
    """Train from nothing; ``plan`` is the recipe's entry for the target."""
    torch.manual_seed(plan["seed"])
    model = TargetModel(shape).to(device)
    if device == "cuda" and plan["compile"]:
        torch._dynamo.config.suppress_errors = True  # a compiler that fails costs speed only
        for layer in model.layers:
            layer.compile()
    data = torch.from_numpy(rows).to(device)
    generator = torch.Generator().manual_seed(plan["seed"])
    order = torch.randperm(len(data), generator=generator)
    adam = optimizer(list(model.parameters()), plan["learning_rate"])
    schedule = Schedule(plan["steps"], plan["seconds"], plan["warmup"])
    at = 0
    while (factor := schedule.next()) is not None:
        if at + plan["rows"] > len(order):
            order, at = torch.randperm(len(data), generator=generator), 0
        batch = data[order[at : at + plan["rows"]].to(device)]
        at += plan["rows"]
        for group in adam.param_groups:
            group["lr"] = plan["learning_rate"] * factor
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, answer = _loss(model, batch)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        if schedule.step % plan["log_every"] == 0 or schedule.step == 3:
            line = f"target step {schedule.step} loss {loss.item():.4f} answer {answer.item():.4f}"
            print(f"{line} at {schedule.elapsed():.0f} s", flush=True)
    plan["steps_done"] = schedule.step
    plan["seconds_taken"] = round(schedule.elapsed(), 1)
    return model


def target_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": shape.eps,
        "max_position_embeddings": shape.positions,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": tokens.BOS,
        "eos_token_id": tokens.EOS,
        "pad_token_id": tokens.PAD,
    }


def save_target(model: TargetModel, folder: Path) -> None:
    """config.json, generation_config.json, model.safetensors (bfloat16; embeddings are tied)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = target_config(model.shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "bos_token_id": tokens.BOS,
        "eos_token_id": tokens.EOS,
        "pad_token_id": tokens.PAD,
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    state = {
        f"model.{name.replace('_orig_mod.', '')}": p.detach().to("cpu", torch.bfloat16).contiguous()
        for name, p in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
