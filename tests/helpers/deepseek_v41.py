"""Tiny random DeepSeek-V4.1 checkpoints, with a drafter; and a slow definition of both.

    folder = write_deepseek_v41(tmp_path / "v41")
    folder = write_deepseek_v41(tmp_path / "v41", packed=True)    # fp8 by 32 x 32, fp4 experts

Seven layers: a window; entries of two tokens and a layer that only reads them; entries of one
token, whose indexer finds 3 blocks of 2 entries, a reader, an indexer that chooses inside those
blocks, and its reader; two of them with Engram tables of pairs and triples. Window 8, 3 entries
chosen, 4 streams, 8 experts of which 2 work; a drafter of two stages, gamma 4, 4 experts of which
3 work, that taps before layers 1 and 3.
"""

import json
import math
import re
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.kernels.packed import pack, unpack
from tests.helpers.checkpoints import read_tensors, write_tokenizer
from tests.helpers.deepseek_v4 import (
    DELAYED,
    GAMMA,
    RANK,
    STAGES,
    TAPS,
    WINDOW,
    PlainDelayed,
    draft_tensors,
    drawn,
    kind_of_packing,
)
from tests.helpers.drafts import BOS, EOS, MASK

RATIOS = (0, 2, 2, 1, 1, 1, 1)
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 128,
    "hidden_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 4,
    "o_lora_rank": 8,
    "hidden_act": "silu",
    "swiglu_limit": 0.8,
    "rms_norm_eps": 1e-20,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": WINDOW,
    "compress_ratios": [*RATIOS, *[0] * STAGES],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": GAMMA,
    "dspark_noise_token_id": MASK,
    "dspark_target_layer_ids": list(TAPS),
    "dspark_markov_rank": RANK,
    "dspark_n_routed_experts": DELAYED["dspark_n_routed_experts"],
    "dspark_num_experts_per_tok": DELAYED["dspark_num_experts_per_tok"],
}
ENGRAM: dict[str, Any] = {
    "engram_layer_ids": [1, 4],
    # 11 + 13 and 17 + 19; 23 + 29 and 31 + 37
    "engram_num_embeddings": [60, 120],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 11,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_pad_token_id": 3,
}
BUCKETS = {1: (11, 13, 17, 19), 4: (23, 29, 31, 37)}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "image_token_id": 127,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "text_config": TEXT,
    "vision_config": {"model_type": "deepseek_v41_vision", "hidden_size": 64},
}
QUANTISED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def write_deepseek_v41(
    folder: Path, *, packed: bool = False, engram: bool = True, seed: int = 0, **text: Any
) -> Path:
    """Write a target and, in the same file, its drafter, as released, images included.

    Args:
        folder: Created.
        packed: fp8 by blocks of 32 x 32 and fp4 experts; folder / "plain" has the same numbers
            unpacked.
        engram: With tables of n-grams?
        seed: Of all weights.
        text: Merged into text_config at the end.
    """
    folder.mkdir(parents=True)
    config = SimpleNamespace(**{**TEXT, **text})
    generator = torch.Generator().manual_seed(seed)
    shapes = target_shapes(config)
    tensors = {name: drawn(name, shape, generator) for name, shape in shapes.items()}
    values = {**CONFIG, "text_config": {**TEXT, **text}}
    write_tokenizer(folder)
    if engram:
        tensors |= {n: drawn(n, s, generator) for n, s in engram_shapes(config).items()}
        numbers = numbers_of(folder / "tokenizer.json")
        values["text_config"] |= ENGRAM | {"engram_compressed_vocab_size": max(numbers) + 1}
    tensors |= draft_tensors(config, confidence=True, delayed=True, seed=seed + 1)
    # of images: nobody reads them
    for name in ("vision.blocks.0.weight", "aligner.weight", "image_start"):
        tensors[name] = torch.zeros(3)
    for name in ("layers.0", "mtp.1"):
        tensors[f"{name}.ffn.gate.bias_vl"] = torch.zeros(8)
    _write(folder, values | {"dtype": "float32"}, tensors)
    if packed:
        shutil.copytree(folder, folder / "plain")
        found, plain = _packed(tensors)
        _write(folder / "plain", values | {"dtype": "float32"}, plain)
        _write(folder, values | {"dtype": "float32", "quantization_config": QUANTISED}, found)
    return folder


def _write(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _packed(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """As they are stored, and what they stand for."""
    found, plain = dict(tensors), dict(tensors)
    for name, x in tensors.items():
        kind = "fp8" if "engram.wkv" in name else kind_of_packing(name, "fp4")
        if "engram.embed" in name:  # rows by themselves, as blocks of one row would be
            made = [pack(row[None].expand(32, -1), "fp8", block=32) for row in x]
            plain[name] = torch.cat([unpack(row)[:1] for row in made])
            found[name] = torch.cat([row.weight.view(torch.uint8)[:1] for row in made])
            found[name] = found[name].view(torch.float8_e4m3fn)
            scale = torch.cat([row.scale for row in made]).view(torch.float8_e8m0fnu)
            found[name.removesuffix("weight") + "scale"] = scale
            continue
        if kind is None:
            continue
        made = pack(x, kind, block=32)
        plain[name] = unpack(made)
        found[name] = made.weight.view(torch.int8) if kind == "fp4" else made.weight
        scale = made.scale.view(torch.float8_e8m0fnu)
        found[name.removesuffix("weight") + "scale"] = scale
    return found, plain


def target_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    """The target's tensors by their released names."""
    h, d, heads, s, i = (
        c.hidden_size,
        c.head_dim,
        c.num_attention_heads,
        c.hc_mult,
        c.index_head_dim,
    )
    low, groups, rank, e = c.q_lora_rank, c.o_groups, c.o_lora_rank, c.n_routed_experts
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (c.vocab_size, h),
        "head.weight": (c.vocab_size, h),
        "norm.weight": (h,),
    }
    for layer in range(c.num_hidden_layers):
        block: dict[str, tuple[int, ...]] = {
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
            for n in ("w1", "w2", "w3"):
                shape = (h, c.moe_intermediate_size)
                block[f"ffn.{expert}.{n}.weight"] = shape if n == "w2" else shape[::-1]
        if layer in c.kv_source_layer_ids:
            block["attn.compressor.wkv.weight"] = (d, h)
            if c.compress_ratios[layer] > 1:
                block["attn.compressor.wgate.weight"] = (d, h)
            block["attn.compressor.norm.weight"] = (d,)
            block["attn.indexer.wk.weight"] = (i, d)
            block["attn.indexer.k_norm.weight"] = (i,)
        if layer in c.index_source_layer_ids:
            block["attn.indexer.wq_b.weight"] = (c.index_n_heads * i, low)
            block["attn.indexer.weights_proj.weight"] = (c.index_n_heads, h)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes


def engram_shapes(c: Any) -> dict[str, tuple[int, ...]]:
    """Tensors of the layers that have tables, by their released names."""
    h, s, width = c.hidden_size, c.hc_mult, ENGRAM["engram_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, buckets in BUCKETS.items():
        shapes |= {
            f"layers.{layer}.engram.embed.weight": (sum(buckets), width),
            f"layers.{layer}.engram.wkv.weight": ((s + 1) * h, len(buckets) * width),
            f"layers.{layer}.engram.q_weight": (s, h),
            f"layers.{layer}.engram.k_weight": (s, h),
        }
    return shapes


def numbers_of(tokenizer: Path) -> list[int]:
    """By token id, a number that tokens which read alike share, by what Unicode says of letters."""
    read = Tokenizer.from_file(str(tokenizer))
    seen: list[str] = []
    found = []
    for token in range(read.get_vocab_size()):
        text = read.decode([token], skip_special_tokens=False)
        letters = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        plain = "".join(c for c in letters if unicodedata.category(c) != "Mn").lower()
        plain = re.sub("[ \t\r\n]+", " ", plain)
        key = (plain if plain == " " else plain.strip()) or text
        key = str(read.id_to_token(token)) if "\ufffd" in text else key
        seen += [] if key in seen else [key]
        found.append(seen.index(key))
    return found


class PlainV41(PlainDelayed):
    """The target and its drafter in float64, a whole sequence at a time; nothing is kept.

    What V4.1 shares with `PlainDelayed`'s networks, streams and experts, is defined there; its
    attention is defined here, a token at a time.
    """

    def __init__(self, folder: Path) -> None:
        """Read the weights, which must not be packed."""
        values = json.loads((folder / "config.json").read_text())
        self.config: Any = SimpleNamespace(**values["text_config"])
        self.per_token = self.config.dspark_num_experts_per_tok
        self.w = {n.removeprefix("mtp."): x.double() for n, x in read_tensors(folder).items()}
        self.embed, self.head = self.w["embed.weight"], self.w["head.weight"]
        self.entries, self.index = torch.empty(0), torch.empty(0)
        self.numbers = numbers_of(folder / "tokenizer.json")
        self.blocks: list[set[int]] = []
        self.chosen: list[list[int]] = []

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens, one at a time from the start, up to the end."""
        ids = list(tokens)
        while len(ids) < len(tokens) + count and (len(ids) == len(tokens) or ids[-1] != EOS):
            ids.append(int(self.states(ids)[1][-1].argmax()))
        return ids[len(tokens) :]

    def states(self, tokens: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Streams that enter each layer and leave the last, [T, S, H], and logits [T, V]."""
        streams, pre = self.embed[torch.tensor(list(tokens))][:, None].repeat(1, 4, 1), None
        taken, nothing = [], streams.new_zeros(0, self.config.hidden_size)
        for i in range(self.config.num_hidden_layers):
            if f"layers.{i}.engram.wkv.weight" in self.w:
                streams = self._fed(i, streams, tokens)
            taken.append(streams)
            streams, pre = self._stage(f"layers.{i}.", streams, pre, (nothing, 0))
        hidden = self._norm(torch.einsum("ts,tsh->th", pre, streams), self.w["norm.weight"])
        return [*taken, streams], hidden @ self.head.T

    def _fed(self, layer: int, streams: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """A token at a time: its pair, its triple, two rows of each, four gates."""
        k, longest = f"layers.{layer}.engram.", ENGRAM["engram_max_ngram_size"]
        count = max(self.numbers) + 1
        drawn_ = np.random.default_rng(10007 * layer).integers(
            low=0, high=(2**63 - 1) // count // 2, size=(longest,), dtype=np.int64
        )
        odd, out = [2 * int(n) + 1 for n in drawn_], []
        for t in range(len(tokens)):
            before = [tokens[t - i] if t >= i else ENGRAM["engram_pad_token_id"] for i in range(3)]
            products = [self.numbers[token] * m for token, m in zip(before, odd, strict=True)]
            pair = products[0] ^ products[1]
            hashes = [pair, pair, pair ^ products[2], pair ^ products[2]]
            rows = [sum(BUCKETS[layer][:i]) + h % BUCKETS[layer][i] for i, h in enumerate(hashes)]
            e = self.w[f"{k}embed.weight"][rows].flatten()
            *keys, value = (self.w[f"{k}wkv.weight"] @ e).view(5, -1)
            fed = []
            for j, key in enumerate(keys):
                r = streams[t, j]
                both = self.w[f"{k}q_weight"][j] * self.w[f"{k}k_weight"][j]
                dot = float((self._norm(r, 1.0) * both * self._norm(key, 1.0)).sum())
                dot /= math.sqrt(len(r))
                gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)))
                fed.append(r + gate * value)
            out.append(torch.stack(fed))
        return torch.stack(out)

    def _attend(self, k: str, x: torch.Tensor, context: torch.Tensor, first: int) -> torch.Tensor:
        if not k.startswith("layers."):
            return super()._attend(k, x, context, first)
        layer, w, c = int(k.split(".")[1]), self.w, self.config
        ratio = c.compress_ratios[layer]
        angles = self._slow() if ratio else self._frequencies()
        places = torch.arange(len(x))
        low = self._norm(x @ w[f"{k}attn.wq_a.weight"].T, w[f"{k}attn.q_norm.weight"])
        q = (low @ w[f"{k}attn.wq_b.weight"].T).view(len(x), -1, c.head_dim)
        q = turned(q, places, angles)
        kv = self._norm(x @ w[f"{k}attn.wkv.weight"].T, w[f"{k}attn.kv_norm.weight"])
        kv = turned(kv, places, angles)
        if layer in c.kv_source_layer_ids:
            self._make(f"{k}attn.", x, ratio, angles)
        if layer in c.index_source_layer_ids:
            self._choose(layer, f"{k}attn.indexer.", x, low, angles)
        out = []
        for t in range(len(x)):
            seen = kv[max(t - WINDOW + 1, 0) : t + 1]
            if ratio:
                seen = torch.cat((seen, self.entries[self.chosen[t]]))
            shares = (q[t] @ seen.T / math.sqrt(c.head_dim)).exp()
            total = shares.sum(1) + w[f"{k}attn.attn_sink"].exp()
            out.append((shares / total[:, None]) @ seen)
        back = turned(torch.stack(out), -places, angles)
        groups = back.reshape(len(x), c.o_groups, -1)
        wo_a = w[f"{k}attn.wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        return torch.einsum("tgi,goi->tgo", groups, wo_a).flatten(1) @ w[f"{k}attn.wo_b.weight"].T

    def _make(self, k: str, x: torch.Tensor, ratio: int, angles: torch.Tensor) -> None:
        """Entries and index keys, of all windows that are full."""
        w, latents = self.w, []
        values = x @ w[f"{k}compressor.wkv.weight"].T
        for first in range(0, len(x) - ratio + 1, ratio):
            one = values[first]
            if ratio > 1:
                gates = x[first : first + ratio] @ w[f"{k}compressor.wgate.weight"].T
                shares = gates.exp() / gates.exp().sum(0)
                one = (shares * values[first : first + ratio]).sum(0)
            latents.append(self._norm(one, w[f"{k}compressor.norm.weight"]))
        all_ = torch.stack(latents) if latents else values[:0]
        places = torch.arange(len(all_)) * ratio
        keys = self._norm(all_ @ w[f"{k}indexer.wk.weight"].T, w[f"{k}indexer.k_norm.weight"])
        self.entries, self.index = turned(all_, places, angles), turned(keys, places, angles)

    def _choose(
        self,
        layer: int,
        k: str,
        x: torch.Tensor,
        low: torch.Tensor,
        angles: torch.Tensor,
    ) -> None:
        """Entries of every token; blocks too, or only inside them."""
        c, ratio = self.config, self.config.compress_ratios[layer]
        heads, width, source = c.index_n_heads, c.index_head_dim, c.candidate_source_layer_id
        q = (low @ self.w[f"{k}wq_b.weight"].T).view(len(x), heads, width)
        q = turned(q, torch.arange(len(x)), angles)
        weights = x @ self.w[f"{k}weights_proj.weight"].T / math.sqrt(heads * width)
        size, self.chosen = c.candidate_block_size, []
        if layer == source:
            self.blocks = []
        for t in range(len(x)):
            closed = (t + 1) // ratio
            scores = (weights[t][:, None] * (q[t] @ self.index[:closed].T).clamp(min=0)).sum(0)
            ranked = [int(e) for e in scores.argsort(descending=True)]
            if layer == source:
                order = [(closed - 1) // size] if closed else []
                order += [e // size for e in ranked]
                self.blocks.append(set(list(dict.fromkeys(order))[: c.candidate_topk_blocks]))
            if 0 <= source < layer:
                ranked = [e for e in ranked if e // size in self.blocks[t]]
            self.chosen.append(ranked[: c.index_topk])

    def _slow(self) -> torch.Tensor:
        """Angles a position of what sees entries: YaRN, in between by a ramp over the pairs."""
        c = self.config
        pairs, theta, yarn = c.qk_rope_head_dim // 2, c.compress_rope_theta, c.rope_scaling

        def pair_with(turns: float) -> float:
            wave = yarn["original_max_position_embeddings"] / turns
            return pairs * math.log(wave / (2 * math.pi)) / math.log(theta)

        first = max(math.floor(pair_with(yarn["beta_fast"])), 0)
        last = min(math.ceil(pair_with(yarn["beta_slow"])), c.qk_rope_head_dim - 1)
        found = []
        for i in range(pairs):
            slow = min(max((i - first) / max(last - first, 1e-3), 0.0), 1.0)
            angle = theta ** (-i / pairs)
            found.append(angle * (1 - slow) + angle / yarn["factor"] * slow)
        return torch.tensor(found, dtype=torch.float64)


def turned(x: torch.Tensor, places: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[T, .., D]: the last channels by pairs, each by its angle times a position."""
    width = 2 * len(angles)
    angle = places.double()[:, None] * angles
    while angle.ndim < x.ndim:
        angle = angle[:, None]
    still, (a, b) = x[..., :-width], x[..., -width:].unflatten(-1, (-1, 2)).unbind(-1)
    both = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.cat((still, torch.stack(both, -1).flatten(-2)), dim=-1)
