"""Tiny random DeepSeek-V4 checkpoints, with a drafter, in every spelling; and slow definitions.

    folder = write_deepseek_v4(tmp_path / "v4")                   # as transformers saves it
    folder = write_deepseek_v4(tmp_path / "v4", names="released")

One window, two sparse and one heavy layer, window 8, entries of 4 and 8 tokens, of which 3 are
chosen, 4 streams, 8 experts of which 2 work, the first layer hashed; a drafter of two stages, gamma
4, that taps after layers 1 and 3. The target is transformers' own class, so that it is the
reference too. What that initialises to zeros or ones is drawn anew, and limits are small enough to
bite.
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.kernels.packed import pack, unpack
from tests.helpers.checkpoints import read_tensors, write_tokenizer
from tests.helpers.drafts import BOS, EOS, MASK

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = ("sliding_attention", SPARSE, HEAVY, SPARSE)
RATIOS = {"sliding_attention": 0, SPARSE: 4, HEAVY: 128}
WINDOW, GAMMA, STAGES, TAPS, RANK = 8, 4, 2, (1, 3), 6
DELAYED = {
    "hc_pre_from_prev_sublayer": True,
    "q_head_norm": False,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 3,
}
MARKOV_NAMES = {False: ("markov_w1", "markov_w2"), True: ("embed", "head")}


def write_deepseek_v4(
    folder: Path,
    *,
    names: str = "saved",
    kinds: Sequence[str] = KINDS,
    heavy: int = 8,
    draft: bool = True,
    confidence: bool = True,
    packed: str | None = None,
    delayed: bool = False,
    config: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a target and, in the same file, its drafter.

    Args:
        folder: Created.
        names: "saved" as save_pretrained does, "memory" as transformers holds them, or "released",
            which also writes config.json the released way.
        kinds: Layers, as transformers calls them.
        heavy: Tokens to an entry of a heavy layer; released checkpoints have 128.
        draft: With a drafter?
        confidence: With its confidence head?
        packed: "fp4" or "fp8" routed experts, the rest as released checkpoints have it; then
            folder / "plain" has the same numbers unpacked, as transformers saves them.
        delayed: As V4.1 is: streams collapse by what the sublayer before has found, query heads
            are not normed, no experts are looked up, the drafter has other experts than the target.
            Then transformers is no reference: see `PlainDelayed`.
        config: Merged into config.json at the end.
        seed: Of all weights.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    # gate and up of fp8 experts lie in blocks of their own
    width = 128 if packed == "fp8" else 32
    model = _random_target(tuple(kinds), heavy, width, seed, hashed=not delayed)
    memory = {n: t.clone() for n, t in model.state_dict().items() if "inv_freq" not in n}
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    tensors = read_tensors(folder)
    if names == "memory":
        tensors = memory
    elif names == "released":
        tensors = {_released(name): tensor for name, tensor in tensors.items()}
        values = _released_config(values, tuple(kinds), heavy)
    if delayed:
        tensors = {n: x for n, x in tensors.items() if "hc_head" not in n}
        values |= DELAYED
    if packed:
        assert names == "released"
        values["quantization_config"] = QUANTISED
    if draft:
        how = {"confidence": confidence, "delayed": delayed, "seed": seed + 1}
        tensors |= draft_tensors(model.config, **how)
        values |= {
            "dspark_block_size": GAMMA,
            "dspark_noise_token_id": MASK,
            "dspark_target_layer_ids": list(TAPS),
            "dspark_markov_rank": RANK,
        }
    if packed:
        tensors = _packed(folder, tensors, packed)
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


QUANTISED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
}
_FP8 = re.compile(
    r".*\.(attn\.w[qo]_[ab]|attn\.wkv|indexer\.wq_b|main_proj|shared_experts\.w\d)\.weight"
)
_EXPERT = re.compile(r".*\.ffn\.experts\.\d+\.w\d\.weight")


def kind_of_packing(name: str, experts: str) -> Any:
    """How a released checkpoint stores a tensor: fp8, as `experts` says, or not packed."""
    return experts if _EXPERT.fullmatch(name) else "fp8" if _FP8.fullmatch(name) else None


def _packed(
    folder: Path, tensors: dict[str, torch.Tensor], experts: str
) -> dict[str, torch.Tensor]:
    """Packed tensors; what they stand for goes to folder / "plain", the target's part of it."""
    found, plain = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        kind = kind_of_packing(name, experts)
        if kind is None:
            continue
        made = pack(x, kind, float_scale=experts == kind == "fp8" and "experts." in name)
        plain[name] = unpack(made)
        scale = made.scale
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        found[name] = made.weight.view(torch.int8) if kind == "fp4" else made.weight
        found[name.removesuffix("weight") + "scale"] = scale
    shutil.copytree(folder, folder / "plain", ignore=shutil.ignore_patterns("plain"))
    saved = {_saved(n): x for n, x in plain.items() if not n.startswith("mtp.")}
    save_file(saved, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    return found


def _saved(name: str) -> str:
    """The inverse of `_released`."""
    name = name.replace("hc_head_", "hc_head.hc_").replace(".attn.kv_norm.", ".attn.norm.")
    if name in ("head.weight", "embed.weight"):
        return {"head.weight": name, "embed.weight": "model.embed_tokens.weight"}[name]
    return f"model.{name}"


def _random_target(
    kinds: tuple[str, ...], heavy: int, width: int, seed: int, *, hashed: bool
) -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    made = DeepseekV4Config(
        vocab_size=128,
        hidden_size=32,
        moe_intermediate_size=width,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=4,
        o_lora_rank=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        swiglu_limit=0.8,
        layer_types=list(kinds),
        compress_rates={SPARSE: 4, HEAVY: heavy},
        mlp_layer_types=["hash_moe" if hashed else "moe"] + ["moe"] * (len(kinds) - 1),
        sliding_window=WINDOW,
        # scores of few heads are often exactly 0 after the ReLU, and ties are anyone's choice
        index_n_heads=16,
        index_head_dim=16,
        index_topk=3,
        max_position_embeddings=512,
        bos_token_id=BOS,
        eos_token_id=EOS,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    )
    made._experts_implementation = made._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(made).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if "tid2eid" in name:
                order = torch.rand(x.shape[0], 8, generator=generator).argsort(dim=1)
                x.copy_(order[:, : x.shape[1]])
            elif "inv_freq" not in name:
                x.copy_(drawn(name, tuple(x.shape), generator))
    model.generation_config.eos_token_id = EOS
    return model


def drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Of a size that keeps activations near 1 and uses every part."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return 1.0 + 0.2 * noise
    if name.endswith("scale"):
        return 0.8 + 0.2 * noise
    if "embed" in name or "sink" in name or ("w1.weight" in name and "markov" in name):
        return noise
    if name.endswith(("base", "bias", "ape")):
        return 0.4 * noise
    return 1.2 * noise * shape[-1] ** -0.5


def draft_tensors(
    config: Any, *, confidence: bool, delayed: bool, seed: int
) -> dict[str, torch.Tensor]:
    """A random drafter by its released names."""
    h, d, heads, s = config.hidden_size, config.head_dim, config.num_attention_heads, config.hc_mult
    e = DELAYED["dspark_n_routed_experts"] if delayed else config.n_routed_experts
    i, low = config.moe_intermediate_size, config.q_lora_rank
    groups, rank = config.o_groups, config.o_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "0.main_proj.weight": (h, len(TAPS) * h),
        "0.main_norm.weight": (h,),
    }
    for k in range(STAGES):
        block = {
            "attn.wq_a.weight": (low, h),
            "attn.wq_b.weight": (heads * d, low),
            "attn.wkv.weight": (d, h),
            "attn.wo_a.weight": (groups * rank, heads * d // groups),
            "attn.wo_b.weight": (h, groups * rank),
            "attn.q_norm.weight": (low,),
            "attn.kv_norm.weight": (d,),
            "attn.attn_sink": (heads,),
            "attn_norm.weight": (h,),
            "ffn_norm.weight": (h,),
            "ffn.gate.weight": (e, h),
            "ffn.gate.bias": (e,),
        }
        for part in ("attn", "ffn"):
            block[f"hc_{part}_fn"] = (s * (s + 2), s * h)
            block[f"hc_{part}_base"] = (s * (s + 2),)
            block[f"hc_{part}_scale"] = (3,)
        for expert in [*(f"experts.{j}" for j in range(e)), "shared_experts"]:
            for n, shape in (("w1", (i, h)), ("w2", (h, i)), ("w3", (i, h))):
                block[f"ffn.{expert}.{n}.weight"] = shape
        shapes |= {f"{k}.{name}": shape for name, shape in block.items()}
    last = STAGES - 1
    for n in MARKOV_NAMES[delayed]:
        shapes[f"{last}.markov_head.{n}.weight"] = (config.vocab_size, RANK)
    shapes[f"{last}.norm.weight"] = (h,)
    if not delayed:
        shapes[f"{last}.hc_head_fn"] = (s, s * h)
        shapes |= {f"{last}.hc_head_base": (s,), f"{last}.hc_head_scale": (1,)}
    if confidence:
        shapes[f"{last}.confidence_head.proj.weight"] = (1, h + RANK)
    generator = torch.Generator().manual_seed(seed)
    return {f"mtp.{n}": drawn(n, shape, generator) for n, shape in shapes.items()}


def _released(name: str) -> str:
    """The released name of a saved one."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    if name.endswith(".attn.norm.weight"):
        return name.replace(".attn.norm.", ".attn.kv_norm.")
    return {"embed_tokens.weight": "embed.weight"}.get(name, name)


def _released_config(values: dict[str, Any], kinds: tuple[str, ...], heavy: int) -> dict[str, Any]:
    """As released: numbers a layer, past the last one those of the drafter; flat rope."""
    assert heavy == 128, "the released spelling knows one ratio of heavy layers"
    gone = ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters")
    kept = {k: v for k, v in values.items() if k not in (*gone, "partial_rotary_factor")}
    return kept | {
        "compress_ratios": [*(RATIOS[kind] for kind in kinds), *[0] * STAGES],
        "num_hash_layers": 1,
        "qk_rope_head_dim": 8,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }


# ---- the drafter, defined once more: float64, one block at a time, nothing kept --------------


class PlainV4Draft:
    """What a draft block computes, from the target's streams of all tokens before the anchor."""

    delayed = False

    def __init__(self, folder: Path, target: Any) -> None:
        """Read the weights; `target` is a PlainTarget."""
        self.target = target
        config = target.model.config
        self.config, self.per_token = config, config.num_experts_per_tok
        self.w = {
            n.removeprefix("mtp."): t.double()
            for n, t in read_tensors(folder).items()
            if n.startswith("mtp.")
        }
        state = target.model.state_dict()
        self.embed = state["model.embed_tokens.weight"].double()
        self.head = state["lm_head.weight"].double()

    def draft(self, tokens: Sequence[int]) -> tuple[list[int], list[float]]:
        """Drafts and confidence logits after `tokens`, the last of which is the anchor."""
        first = len(tokens) - 1
        states, _ = self.target.states(tokens)
        taps = torch.cat([states[k + 1][:first].double().mean(dim=1) for k in TAPS], dim=1)
        return self.finish(self.block(tokens[-1], taps), tokens[-1])

    def block(self, anchor: int, taps: torch.Tensor) -> torch.Tensor:
        """What the head reads, [G, H], given taps [P, A * H] of all tokens before the anchor."""
        w, last, first = self.w, f"{STAGES - 1}.", len(taps)
        context = self._norm(taps @ w["0.main_proj.weight"].T, w["0.main_norm.weight"])
        ids = torch.tensor([anchor, *[MASK] * (GAMMA - 1)])
        streams = self.embed[ids][:, None].repeat(1, 4, 1)
        pre = None
        for k in range(STAGES):
            streams, pre = self._stage(f"{k}.", streams, pre, (context, first))
        if not self.delayed:
            mix = [w[f"{last}hc_head_{n}"] for n in ("fn", "base", "scale")]
            pre = torch.sigmoid(self._dots(streams, mix[0]) * mix[2] + mix[1]) + self.config.hc_eps
        return torch.einsum("ts,tsh->th", pre, streams)

    def finish(self, hidden: torch.Tensor, anchor: int) -> tuple[list[int], list[float]]:
        """Left to right over one block."""
        w, last = self.w, f"{STAGES - 1}."
        base = self._norm(hidden, w[f"{last}norm.weight"]) @ self.head.T
        first, second = (w[f"{last}markov_head.{n}.weight"] for n in MARKOV_NAMES[self.delayed])
        drafts, confidences, before = [], [], anchor
        for k in range(GAMMA):
            e = first[before]
            logits = base[k] + second @ e
            if f"{last}confidence_head.proj.weight" in w:
                row = w[f"{last}confidence_head.proj.weight"][0]
                confidences.append(float(row @ torch.cat((hidden[k], e))))
            before = int(logits.argmax())
            drafts.append(before)
        return drafts, confidences

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * weight

    def _dots(self, streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        return self._norm(streams.flatten(1), 1.0) @ fn.T

    def _turn(self, x: torch.Tensor, first: int, sign: int) -> torch.Tensor:
        """As complex numbers: channel pairs times e^(i angle)."""
        angle = torch.arange(first, first + len(x)).double()[:, None] * self._frequencies()
        turn = torch.polar(torch.ones_like(angle), sign * angle)
        pairs = torch.view_as_complex(x[..., -8:].reshape(*x.shape[:-1], 4, 2).contiguous())
        turn = turn if x.ndim == 2 else turn[:, None]
        return torch.cat((x[..., :-8], torch.view_as_real(pairs * turn).flatten(-2)), dim=-1)

    @staticmethod
    def _frequencies() -> torch.Tensor:
        return torch.tensor([10000.0 ** (-i / 4) for i in range(4)]).double()

    def _stage(
        self,
        k: str,
        streams: torch.Tensor,
        before: torch.Tensor | None,
        where: tuple[torch.Tensor, int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for part, norm in (("attn", "attn_norm"), ("ffn", "ffn_norm")):
            pre, post, comb = self._mix(streams, f"{k}hc_{part}_")
            used = before if self.delayed else pre
            x = streams[:, 0] if used is None else torch.einsum("ts,tsh->th", used, streams)
            x = self._norm(x, self.w[f"{k}{norm}.weight"])
            y = self._attend(k, x, *where) if part == "attn" else self._experts(k, x)
            mixed = torch.einsum("tij,tih->tjh", comb, streams)
            streams, before = torch.einsum("tj,th->tjh", post, y) + mixed, pre
        return streams, before

    def _mix(self, streams: torch.Tensor, prefix: str) -> tuple[torch.Tensor, ...]:
        fn, base, scale = (self.w[prefix + n] for n in ("fn", "base", "scale"))
        m, eps = self._dots(streams, fn), self.config.hc_eps
        pre = torch.sigmoid(m[:, :4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
        comb = torch.softmax((m[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4), -1) + eps
        for turn in range(2 * self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(1 + turn % 2, keepdim=True) + eps)
        return pre, post, comb

    def _attend(self, k: str, x: torch.Tensor, context: torch.Tensor, first: int) -> torch.Tensor:
        w, d = self.w, self.config.head_dim

        def keys(rows: torch.Tensor, at: int) -> torch.Tensor:
            kv = self._norm(rows @ w[f"{k}attn.wkv.weight"].T, w[f"{k}attn.kv_norm.weight"])
            return self._turn(kv, at, 1)

        low = self._norm(x @ w[f"{k}attn.wq_a.weight"].T, w[f"{k}attn.q_norm.weight"])
        q = (low @ w[f"{k}attn.wq_b.weight"].T).view(len(x), -1, d)
        q = self._turn(q if self.delayed else self._norm(q, 1.0), first, 1)
        seen = torch.cat((keys(context, 0)[-WINDOW:], keys(x, first)))
        scores = torch.einsum("qhd,kd->qhk", q, seen) / math.sqrt(d)
        if not len(context):  # a target's own tokens, in its window
            ages = torch.arange(len(x))[:, None] - torch.arange(len(x))
            outside = (ages < 0) | (ages >= WINDOW)
            scores = scores.masked_fill(outside[:, None], float("-inf"))
        sinks = w[f"{k}attn.attn_sink"]
        weights = scores.exp() / (scores.exp().sum(-1) + sinks.exp())[..., None]
        out = self._turn(torch.einsum("qhk,kd->qhd", weights, seen), first, -1)
        groups = out.reshape(len(x), self.config.o_groups, -1)
        wo_a = w[f"{k}attn.wo_a.weight"].view(self.config.o_groups, self.config.o_lora_rank, -1)
        return torch.einsum("tgi,goi->tgo", groups, wo_a).flatten(1) @ w[f"{k}attn.wo_b.weight"].T

    def _experts(self, k: str, x: torch.Tensor) -> torch.Tensor:
        w, c = self.w, self.config
        scores = torch.log1p((x @ w[f"{k}ffn.gate.weight"].T).exp()).sqrt()
        out = []
        for row, score in zip(x, scores, strict=True):
            count = self.per_token if k[0].isdigit() else c.num_experts_per_tok
            best = (score + w[f"{k}ffn.gate.bias"]).topk(count).indices.tolist()
            total = sum(score[e] for e in best)
            y = self._expert(f"{k}ffn.shared_experts.", row)
            for e in best:
                share = score[e] / total * c.routed_scaling_factor
                y = y + share * self._expert(f"{k}ffn.experts.{e}.", row)
            out.append(y)
        return torch.stack(out)

    def _expert(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        w, limit = self.w, self.config.swiglu_limit
        gate = (w[f"{prefix}w1.weight"] @ x).clamp(max=limit)
        up = (w[f"{prefix}w3.weight"] @ x).clamp(-limit, limit)
        return w[f"{prefix}w2.weight"] @ (gate / (1 + (-gate).exp()) * up)


class PlainDelayed(PlainV4Draft):
    """The same for checkpoints that are `delayed`, and their targets of windows alone."""

    delayed = True

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig

        self.config = AutoConfig.from_pretrained(folder)
        self.per_token = DELAYED["dspark_num_experts_per_tok"]
        tensors = {_released(n): x.double() for n, x in read_tensors(folder).items()}
        self.w = {n.removeprefix("mtp."): x for n, x in tensors.items()}
        self.embed, self.head = self.w["embed.weight"], self.w["head.weight"]

    def states(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Streams before each layer and after the last, [T, S, H], and logits [T, V]."""
        streams, pre = self.embed[torch.tensor(list(tokens))][:, None].repeat(1, 4, 1), None
        taken = [streams]
        nothing = streams.new_zeros(0, self.config.hidden_size)
        for i in range(self.config.num_hidden_layers):
            streams, pre = self._stage(f"layers.{i}.", streams, pre, (nothing, 0))
            taken.append(streams)
        hidden = self._norm(torch.einsum("ts,tsh->th", pre, streams), self.w["norm.weight"])
        return taken, hidden @ self.head.T

    def draft(self, tokens: Sequence[int]) -> tuple[list[int], list[float]]:
        """Taps are taken before the layers of those numbers."""
        states, _ = self.states(tokens[:-1])
        taps = torch.cat([states[k].mean(dim=1) for k in TAPS], dim=1)
        return self.finish(self.block(tokens[-1], taps), tokens[-1])
