"""The demo's story problems: right arithmetic, separate splits, the same text for the same seed."""

import json
from pathlib import Path

import pytest

from examples.demo import problems

DEMO = Path(problems.__file__).parent
APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return problems.take("test", 4000, held_out=False)


def results_of(answer: str) -> list[int]:
    """Results of the steps, each checked against its own arithmetic."""
    *lines, last = answer.split("\n")
    results = []
    for line in lines:
        ((expression, result),) = problems.STEP.findall(line)
        a, sign, b = expression.split(" ")
        assert APPLY[sign](int(a), int(b)) == int(result), line
        results.append(int(result))
    assert last == f"#### {results[-1]}"
    return results


def test_every_step_of_every_answer_checks_out(rows):
    for row in rows:
        assert all(0 < r < 1000 for r in results_of(row["answer"]))


def test_numbers_of_a_step_come_from_the_question_or_from_earlier_steps(rows):
    """A step may use what the question says (a half, twice) or what a step before it found."""
    implied = {"2", "3", "4", "5"}
    for row in rows:
        known = set(implied)
        for word in "".join(c if c.isdigit() else " " for c in row["question"]).split():
            known.add(word)
        for expression, result in problems.STEP.findall(row["answer"]):
            a, _, b = expression.split(" ")
            assert {a, b} <= known, row
            known.add(result)


def test_one_to_four_steps_all_occur_about_equally(rows):
    counts = [sum(problems.count_steps(r["answer"]) == n for r in rows) for n in range(6)]
    assert counts[0] == counts[5] == 0
    assert min(counts[1:5]) > 0.2 * len(rows)


def test_texts_are_varied_and_have_no_holes(rows):
    assert len({r["question"] for r in rows}) == len(rows)
    assert len({r["question"].split()[0] for r in rows}) > 60
    assert not any("{" in text or "}" in text for r in rows for text in r.values())


def test_many_ways_to_ask_occur(rows):
    endings = {r["question"].split(". ")[-1][:12] for r in rows}
    assert len(endings) > 30


def test_same_seed_same_problems_other_seed_others(rows):
    assert problems.take("test", 100, held_out=False) == rows[:100]
    assert problems.take("other", 100, held_out=False) != rows[:100]


def test_held_out_problems_are_never_training_problems(rows):
    held = problems.take("test", 300, held_out=True)
    assert all(problems.is_held_out(r["question"]) for r in held)
    assert not any(problems.is_held_out(r["question"]) for r in rows)


def test_shipped_held_out_file_is_what_the_generator_makes():
    shipped = [json.loads(x) for x in (DEMO / "heldout.jsonl").read_text().splitlines()]
    assert shipped == problems.take("heldout-0", 200, held_out=True)
    prompts = [json.loads(x) for x in (DEMO / "prompts.jsonl").read_text().splitlines()]
    asked = [p["messages"][0]["content"] for p in prompts]
    assert asked == [r["question"] for r in shipped[:16]]


@pytest.mark.parametrize(("drafter", "count"), [("drafter", 8), ("drafter_rnn", 4)])
def test_golden_answers_add_up(drafter, count):
    golden = json.loads((DEMO / "golden.json").read_text())[drafter]
    assert len(golden) == count
    for g in golden:
        lengths, accepted = g["acceptance_lengths"], g["accepted"]
        assert 1 + sum(lengths) == len(g["output_ids"])
        assert len(lengths) == len(accepted) == len(g["confidence"])
        assert all(n in (a, a + 1) for n, a in zip(lengths, accepted, strict=True))
        assert all(len(c) == 7 for c in g["confidence"])


def test_final_number_is_read_after_the_marks():
    assert problems.final_number("6 * 7 = 42\n#### 42") == "42"
    assert problems.final_number("6 * 7 = 42") is None
