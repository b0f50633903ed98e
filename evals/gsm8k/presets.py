r"""The recipes in use, as data: a score means nothing without the name of its recipe.

Wording, shots, stops, limits and extractor of each are those of the tool it is named after, so that
numbers can be compared; `source` says where they were read. `question` is dspark's own.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from engine.errors import ConfigError
from evals.gsm8k.extract import IGNORED_ZEROSHOT, STRICT_ANSWER_IS, Rules

Shots = Literal["none", "random-train", "first-train", "first-test", "fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One recipe."""

    name: str
    source: str
    """Where the wording and the limits were read."""

    question: str
    """Prompt of one problem, `{question}` in place of its text."""

    shot: str = "{prompt} {answer}\n\n"
    """A worked example: `{prompt}` is `question` of it, `{answer}` its solution."""

    shots: Shots = "none"
    num_shots: int = 0
    chat: bool = False
    """Send the prompt as one user message through the chat template."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    seed_by_row: bool = False
    """A row's seed is `seed` plus its position."""

    sample: int | None = None
    """Rows taken after a shuffle with `seed`; None takes all, in order."""

    headline: str
    """The extractor whose verdict is the score."""

    rules: Rules = field(default_factory=Rules)
    note: str = ""
    """What to know before comparing."""


_LM_EVAL = "EleutherAI/lm-evaluation-harness, lm_eval/tasks/gsm8k/"
_LM_EVAL_STOPS = ("</s>", "<|im_end|>")
_BOXED = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="lm-eval",
            source=_LM_EVAL + "gsm8k.yaml v3.0",
            question="Question: {question}\nAnswer:",
            shots="random-train",
            num_shots=5,
            stop=("Question:", *_LM_EVAL_STOPS),
            headline="flexible",
            note="every row has its own five training rows, drawn in row order with seed 1234; "
            "lm-eval prints strict beside it, see the table of extractors",
        ),
        Preset(
            name="lm-eval-cot",
            source=_LM_EVAL + "gsm8k-cot.yaml v3.0",
            question="Q: {question}\nA:",
            shots="fixed",
            num_shots=8,
            stop=("Q:", *_LM_EVAL_STOPS),
            headline="flexible",
            rules=Rules(strict=STRICT_ANSWER_IS),
        ),
        Preset(
            name="lm-eval-cot-zeroshot",
            source=_LM_EVAL + "gsm8k-cot-zeroshot.yaml v3.0",
            question="Q: {question}\nA: Let's think step by step.",
            stop=("Q:", *_LM_EVAL_STOPS),
            headline="flexible",
            rules=Rules(strict=STRICT_ANSWER_IS, ignored=IGNORED_ZEROSHOT),
        ),
        Preset(
            name="vllm",
            source="vllm-project/vllm, tests/evals/gsm8k/gsm8k_eval.py",
            question="Question: {question}\nAnswer:",
            shots="first-train",
            num_shots=5,
            stop=("Question", "Assistant:", "<|separator|>"),
            seed=42,
            headline="digits_only",
            note="the last run of digits counts: signs and decimals are lost, which scores about "
            "0.7 points too high on some models",
        ),
        Preset(
            name="sglang",
            source="sgl-project/sglang, python/sglang/test/few_shot_gsm8k.py",
            question="Question: {question}\nAnswer:",
            shots="first-test",
            num_shots=5,
            stop=("Question", "Assistant:", "<|separator|>"),
            max_tokens=512,
            headline="digits_only",
            note="its shots are the first rows of the file under test, answers included: the score "
            "without those rows is given beside it",
        ),
        Preset(
            name="deepspec",
            source="deepseek-ai/DeepSpec, deepspec/eval/base_evaluator.py and eval_datasets/",
            question=_BOXED,
            chat=True,
            template_kwargs={"enable_thinking": False},
            max_tokens=2048,
            temperature=1.0,
            seed=980406,
            seed_by_row=True,
            sample=500,
            headline="boxed",
            note="the set on which DSpark's acceptance lengths were published: 500 shuffled rows, "
            "temperature 1, thinking off, 7 drafts a round: 6.11 with Qwen3-4B, 6.17 with 8B, "
            "6.21 with 14B, 6.05 with Gemma4-12B (DSpark's table 1); no accuracy is published",
        ),
        Preset(
            name="boxed",
            source="NeMo-Skills generic/math prompt, as sgl-eval uses it",
            question="Solve the following math problem. Make sure to put the answer (and only "
            "answer) inside \\boxed{}.\n\n{question}",
            chat=True,
            max_tokens=2048,
            headline="boxed",
        ),
        Preset(
            name="question",
            source="dspark: the question alone as a user message",
            question="{question}",
            chat=True,
            max_tokens=1024,
            headline="signed_decimal",
            note="for models trained to answer so, as the demo pair is",
        ),
    )
}

# Wei et al., Chain-of-Thought Prompting Elicits Reasoning in Large Language Models, appendix; the
# worked examples of lm-eval's gsm8k_cot, in its order and wording.
COT_SHOTS = (
    (
        "There are 15 trees in the grove. Grove workers will plant trees in the grove today. After "
        "they are done, there will be 21 trees. How many trees did the grove workers plant today?",
        "There are 15 trees originally. Then there were 21 trees after some more were planted. So "
        "there must have been 21 - 15 = 6. The answer is 6.",
    ),
    (
        "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the "
        "parking lot?",
        "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5.",
    ),
    (
        "Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they "
        "have left in total?",
        "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. "
        "After eating 35, they had 74 - 35 = 39. The answer is 39.",
    ),
    (
        "Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How "
        "many lollipops did Jason give to Denny?",
        "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave "
        "Denny 20 - 12 = 8. The answer is 8.",
    ),
    (
        "Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many "
        "toys does he have now?",
        "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 "
        "more toys. 5 + 4 = 9. The answer is 9.",
    ),
    (
        "There were nine computers in the server room. Five more computers were installed each "
        "day, from monday to thursday. How many computers are now in the server room?",
        "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 "
        "* 4 = 20 computers were added. 9 + 20 is 29. The answer is 29.",
    ),
    (
        "Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 "
        "more. How many golf balls did he have at the end of wednesday?",
        "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. "
        "After losing 2 more, he had 35 - 2 = 33 golf balls. The answer is 33.",
    ),
    (
        "Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
        "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has "
        "23 - 15 dollars left. 23 - 15 is 8. The answer is 8.",
    ),
)


def find_preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        ConfigError: There is none.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}", f"use one of {', '.join(PRESETS)}")
    return PRESETS[name]
