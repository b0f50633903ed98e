"""The demo's tokenizer: byte-level BPE of 1024 entries, single digits, a chat template."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo import problems

VOCAB = 1024
SPECIAL = [
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|mask|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|unused|>",
]
PAD, BOS, EOS, MASK, SYSTEM, USER, ASSISTANT, _ = range(len(SPECIAL))
QUESTION, ANSWER = 1, 2  # what a training token belongs to; 0 is padding

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|eos|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Other ways to ask, so that the target minds the story and not the wrapping.
WRAPPINGS = [
    "{}\nThink step by step and end with #### and the number.",
    "Solve this problem.\n{}",
    "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "Question: {}\nAnswer:",
    "Q: {}\nA:",
    "{}\n",
]
Document = list[tuple[int, int]]


def train_tokenizer(seed: str, rows: int) -> Tokenizer:
    """Learn the merges from stories of the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = problems.take(seed, rows, held_out=False)
    rng = random.Random(seed)
    texts = (rng.choice(WRAPPINGS).format(r["question"]) + "\n" + r["answer"] for r in corpus)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens, wanted {VOCAB}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def chat_prompt(tokenizer: Tokenizer, content: str) -> list[int]:
    """What the chat template makes of one user message."""
    return [BOS, USER, *tokenizer.encode(content, add_special_tokens=False).ids, ASSISTANT]


def wrap(question: str, rng: random.Random) -> str:
    """The question alone, mostly."""
    return question if rng.random() < 0.85 else rng.choice(WRAPPINGS).format(question)


def chat_document(tokenizer: Tokenizer, row: dict[str, str], rng: random.Random) -> Document:
    """One conversation as (token, what it belongs to) pairs."""
    asked = chat_prompt(tokenizer, wrap(row["question"], rng))
    said = [*tokenizer.encode(row["answer"], add_special_tokens=False).ids, EOS]
    return [(t, QUESTION) for t in asked] + [(t, ANSWER) for t in said]


def plain_document(
    tokenizer: Tokenizer, rows: list[dict[str, str]], rng: random.Random
) -> Document:
    """Several problems as bare text, as in a few-shot prompt."""
    q, a = rng.choice([("Question: ", "\nAnswer:"), ("Q: ", "\nA:")])
    document: Document = []
    for i, row in enumerate(rows):
        asked = ("\n\n" if i else "") + q + row["question"] + a
        document += [(t, QUESTION) for t in tokenizer.encode(asked).ids]
        document += [(t, ANSWER) for t in tokenizer.encode(" " + row["answer"]).ids]
    return [*document, (EOS, ANSWER)]
