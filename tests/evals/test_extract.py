"""The five extractors: the edge cases that cost others points, and the published verdicts."""

from typing import Any

import pytest

from evals.gsm8k.data import Problem
from evals.gsm8k.extract import EXTRACTORS, STRICT_ANSWER_IS, Rules, find_signed, read_all

# text -> what flexible, strict and signed_decimal read; None is no answer
CASES: dict[str, tuple[str | None, str | None, str | None]] = {
    "The total is $18.00": ("$18.00", None, "18"),
    "so it is #### 18.0": ("18.0", "18.0", "18"),
    "answer: 5...": ("5...", None, "5"),
    "Let me think ...": ("...", None, None),
    "\\boxed{\\$1{,}000}": ("000", None, "1000"),
    "10\\,000": (",000", None, "10000"),
    "1 000": ("000", None, "1000"),
    "1\u2009000": ("000", None, "1000"),
    "18 (see step 2)": ("2", None, "2"),
    "#### 18 (see step 2)": ("2", "18", "18"),
    "3/4": ("4", None, "0.75"),
    "####18": ("18", None, "18"),
    "####  18": ("18", None, "18"),
    "#### $18": ("$18", None, "18"),
    "#### **18**": ("18", None, "18"),
    "#### 5 ... #### 6": ("6", "5", "6"),
    "\u00bd": (None, None, None),
    "18\u00bd": ("18", None, None),
    "\u0661\u0668": (None, None, None),
    "#### -10": ("-10", "-10", "-10"),
    "x = -3.5": ("-3.5", None, "-3.5"),
    "\u221210 degrees": ("10", None, "-10"),
    "16-3": ("-3", None, "3"),
    "-$5": ("-$5", None, "-5"),
    "2,880,000 people.": ("2,880,000", None, "2880000"),
    "**Answer:** 18 apples at $3 each": ("$3", None, "18"),
    "9*2 = 18 m\u00b2": ("18", None, "18"),
    "USD18": ("18", None, "18"),
    "\\boxed{\\frac{36}{2}}": ("2", None, "18"),
    "1/0": ("0", None, None),
    "": (None, None, None),
}


@pytest.mark.parametrize("text", CASES)
def test_edge_cases(text: str) -> None:
    found = read_all(text, "#### 18", Rules())
    names = ("flexible", "strict", "signed_decimal")
    assert tuple(found[name].text for name in names) == CASES[text]


def test_only_the_safe_one_reads_eighteen_in_all_of_these() -> None:
    for text in ("The total is $18.00", "#### 18.0", "####18", "#### $18", "#### **18**"):
        assert read_all(text, "#### 18", Rules())["signed_decimal"].correct
    for text in ("The total is $18.00", "#### 18.0"):
        found = read_all(text, "#### 18", Rules())
        assert not found["flexible"].correct
        assert not found["digits_only"].correct


def test_two_numbers_and_no_marker_are_ambiguous() -> None:
    assert find_signed("18 (see step 2)").ambiguous
    assert not find_signed("#### 18 (see step 2)").ambiguous
    assert not find_signed("3 * 6 = 18").ambiguous
    assert not find_signed("It is 18.").ambiguous


def test_fractions_and_boxes() -> None:
    assert not read_all("3/4", "#### 4", Rules())["signed_decimal"].correct
    nested = "\\boxed{2} then \\boxed{\\text{so } 18 \\text{ {units}}} or 7"
    found = read_all(nested, "#### 18", Rules())
    assert found["boxed"].correct
    assert found["digits_only"].text == "7"
    assert read_all("\\boxed{18", "#### 18", Rules())["boxed"].text is None


def test_strict_of_the_chain_of_thought_recipes() -> None:
    rules = Rules(strict=STRICT_ANSWER_IS)
    assert read_all("The answer is 18.", "#### 18", rules)["strict"].correct
    # its last dot takes any character, which eats a digit where nothing follows the number
    assert read_all("The answer is 18", "#### 18", rules)["strict"].text == "1"


def test_digits_only_is_that_of_the_others() -> None:
    assert read_all("#### 3.5", "#### 5", Rules())["digits_only"].correct
    assert read_all("#### -10", "#### 10", Rules())["digits_only"].correct
    assert read_all("007", "#### 7", Rules())["digits_only"].text is None
    assert read_all("9" * 5000, "#### 7", Rules())["digits_only"].text is None


def test_every_gold_answer_extracts_to_itself(tested: tuple[Problem, ...]) -> None:
    assert len(tested) == 1319
    for row in tested:
        found = read_all(row.answer, row.answer, Rules())
        want = row.answer.rpartition("#### ")[2]
        assert found["strict"].text == found["flexible"].text == want
        assert found["signed_decimal"].text == want.replace(",", "")
        assert all(found[name].correct for name in EXTRACTORS if name != "boxed")
    golds = [row.answer.rpartition("#### ")[2] for row in tested]
    assert [at for at, gold in enumerate(golds) if gold.startswith("-")] == [489, 1113]
    assert sum("," in gold for gold in golds) == 14


PUBLISHED = {  # model -> correct by label and lm-eval's flexible, correct by digits alone
    "6b_finetuning": (286, 296),
    "6b_verification": (515, 515),
    "175b_finetuning": (458, 467),
    "175b_verification": (742, 742),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_labels(
    model: str, tested: tuple[Problem, ...], solutions: list[dict[str, Any]]
) -> None:
    right = dict.fromkeys(EXTRACTORS, 0)
    for row, published in zip(tested, solutions, strict=True):
        assert row.question == published["question"]
        found = read_all(published[model]["solution"], row.answer, Rules())
        assert found["signed_decimal"].correct == published[model]["is_correct"]
        assert found["flexible"].correct == published[model]["is_correct"]
        for name in EXTRACTORS:
            right[name] += found[name].correct
    labels, digits = PUBLISHED[model]
    assert right["signed_decimal"] == right["flexible"] == labels
    assert right["digits_only"] == digits
