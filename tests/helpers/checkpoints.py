"""Tiny random checkpoints on disk, in the public formats, for tests of loading and the engine.

    target = write_target(tmp_path / "t", "Qwen3ForCausalLM", num_layers=3)
    draft = write_draft(tmp_path / "d", markov="rnn", taps=(1, 3), num_target_layers=3)

The defaults of both fit each other: hidden 32, 4 query and 2 KV heads of 8, vocabulary 128, 3
target layers tapped at h[1] and h[3], gamma 4, a tokenizer with a chat template beside the target.
Targets come from transformers' own classes (`save_pretrained`), so they are the reference too:
`reference_model(target)`. Drafts are written tensor by tensor, see `tests.helpers.drafts`.
Every tensor is random, norms and biases as well, so that a forgotten one changes the output.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.drafts import BOS, EOS, Draft, random_weight
from tests.helpers.drafts import MASK as MASK
from tests.helpers.drafts import UNK as UNK

SPECIAL = ("<s>", "</s>", "<mask>", "<unk>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
DROP = object()
"""As a value for `edit_json`: remove the key."""

_CORPUS = ["the cat sat on the mat and the dog ran to the man", "one two three four five six seven"]


def write_tokenizer(
    folder: Path, vocab_size: int = 128, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """A byte-level BPE of at most `vocab_size` tokens, special ones (BOS, EOS, MASK, UNK) first.

    Below 300 tokens it knows ASCII only; from there on every byte. Encoding prepends <s>.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < 300:
        alphabet = [c for c in alphabet if c.isascii() and c.isprintable()] + ["Ġ", "Ċ"]
    inner.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<mask>"]})
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def write_target(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    num_layers: int = 3,
    hidden_size: int = 32,
    intermediate_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    vocab_size: int = 128,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope: Mapping[str, Any] | None = None,
    max_position: int = 512,
    eos: int | list[int] | None = EOS,
    dtype: str = "float32",
    max_shard_size: str | None = None,
    tokenizer: bool = True,
    seed: int = 0,
) -> Path:
    """Write a Llama, Qwen2 or Qwen3 target.

    Args:
        folder: Created.
        architecture: LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM.
        attention_bias: Llama and Qwen3 only (Qwen2 always has q, k, v biases).
        mlp_bias: Llama only.
        rope: As `rope_parameters` in transformers 5; None: default rope with theta 10000.
        eos: Into generation_config.json and config.json.
        max_shard_size: E.g. "20KB" for several shards and an index.
        tokenizer: Write one, too.
        seed: Of all weights.
    """
    from transformers.utils import logging

    model = _target_class(architecture)
    own: dict[str, Any] = {"attention_bias": attention_bias, "head_dim": head_dim}
    if architecture == "LlamaForCausalLM":
        own["mlp_bias"] = mlp_bias
    elif architecture == "Qwen2ForCausalLM":
        assert head_dim * num_heads == hidden_size, "Qwen2 has no head_dim"
        own = {}
    config = model.config_class(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope or {"rope_type": "default", "rope_theta": 10000.0}),
        max_position_embeddings=max_position,
        bos_token_id=BOS,
        eos_token_id=eos,
        pad_token_id=None,
        **own,
    )
    network = model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(random_weight(name, tuple(parameter.shape), generator))
    network = network.to(getattr(torch, dtype))
    network.generation_config.eos_token_id = eos
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    logging.disable_progress_bar()  # it would end up in the stderr that a test looks at
    network.save_pretrained(folder, **shards)
    if tokenizer:
        write_tokenizer(folder, vocab_size)
    return folder


def reference_model(folder: Path) -> Any:
    """The target as transformers runs it: float32, eager attention, eval mode."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def write_draft(
    folder: Path,
    fmt: str = "deepspec",
    *,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a DSpark drafter.

    Args:
        folder: Created.
        fmt: "deepspec" or "speculators".
        shards: Files to spread the tensors over; more than one writes an index.
        config: Merged into config.json at the end.
        **fields: What the drafter is: the fields of `tests.helpers.drafts.Draft`, e.g. taps, gamma,
            sample_from_anchor, markov, confidence, windows, draft_vocab_size, embed, lm_head, seed.
    """
    assert fmt in ("deepspec", "speculators"), fmt
    draft = Draft(**fields)
    folder.mkdir(parents=True, exist_ok=True)
    values = draft.deepspec_config() if fmt == "deepspec" else draft.speculators_config()
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}, indent=1))
    tensors = draft.tensors()
    if fmt == "deepspec":
        tensors.pop("t2d", None)
    write_tensors(folder, tensors, shards)
    return folder


def write_pair(folder: Path, fmt: str = "deepspec", **fields: Any) -> tuple[Path, Path]:
    """A default target and a draft that fits it, in `folder`/target and `folder`/draft."""
    return write_target(folder / "target"), write_draft(folder / "draft", fmt, **fields)


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """Write model.safetensors, or shards with an index."""
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map, names = {}, list(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def edit_json(path: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of a JSON file; "a.b" reaches into objects, DROP removes."""
    root = json.loads(path.read_text())
    for key, value in changes.items():
        at, *parts = root, *key.split(".")
        for part in parts[:-1]:
            at = at[part]
        if value is DROP:
            at.pop(parts[-1], None)
        else:
            at[parts[-1]] = value
    path.write_text(json.dumps(root))


def _target_class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)
