"""Answers that a response says in words: where they are found, which of several counts, and what states none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.exact.extraction import Forms, extract_answer
from services.reward.item import Item
from services.reward.profiles.registry import make_profiles
from services.reward.verdict import Finding


def find(response: str, forms: Forms = Forms.WORDS) -> str | None:
    """The answer in a response."""
    return extract_answer(response, max_chars=65536, forms=forms)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is 5.", "5"),
        ("The final answer is $0.5$. I hope it is correct.", "$0.5$"),
        ("So the answer is **5**", "5"),
        ("Let me see. The correct answer to this question is 5.5.", "5.5"),
        ("the answer = 5", "5"),
        ("The answer must be 12 sq. units. Done.", "12 sq. units"),
        ("The answer is 1,234.5 dollars.", "1,234.5 dollars"),
        ("The answer is:\n\n5\n", "5"),
        ("The answer is\n\\[\n\\frac{1}{2}\n\\]\n", "\\[\n\\frac{1}{2}\n\\]"),
        ("The answer is $5$, since $2+3=5$.", "$5$"),
        ("The answer is 5, as required.", "5"),
        ("The answer is 5, since $x$ is not zero.", "5"),
        ("The answer is 5, which is the length of AB.", "5"),
        ("The answer is 5 where the lines cross.", "5"),
        ("## Final Answer\n\n$$x = 5$$", "$$x = 5$$"),
        ("## Final Answer\n\n1. $5$\n\nThis is the length of AB in 2 steps.", "$5$"),
        ('The answer is "5".', "5"),
        ("The answer is `5`", "5"),
        ("**Answer**\n5", "5"),
        ("2 + 3 = 5\n#### 42", "42"),
        ("Therefore, the length of AB is 10 cm.", "10 cm"),
        ("So 2x = 10. Therefore $x = 5$.", "$x = 5$"),
        ("Thus the measure of angle 1 is 40 degrees.", "40 degrees"),
        ("So x is 5.", "5"),
        ("Therefore, the sum of x and y is 10.", "10"),
        ("The answer is 5. Wait, let me check: yes, 5.", "5"),
        ("The answer is 5. No further steps are needed.", "5"),
        ("The answer is Evelyn.", "Evelyn"),
        ("The answer is clear. The answer is 5.", "5"),
        ("The answer is not 5. The answer is 6.", "6"),
        ("Is the answer 5? The answer is 6.", "6"),
        ("If x were 3, the answer is 5. It is 4, so the answer is 6.", "6"),
        ("<think>The answer is 4.</think>The answer is 5.", "5"),
        ("The answer is 4. More work follows, with words that lead on to a correction. The answer is 5.", "5"),
    ],
)
def test_an_answer_in_words_is_found(response: str, answer: str) -> None:
    """Sentences about the answer, headings, GSM8K's last line, a last sentence that concludes."""
    assert find(response) == answer
    assert find(response, Forms.MARKS) is None
    assert find(response, Forms.BOX) is None


@pytest.mark.parametrize(
    "response",
    [
        "Is the answer 5?",
        "The answer is 5?",
        "If x is 3, the answer is 5.",
        "Suppose that the answer is 5.",
        "Bob said the answer is 5.",
        "The wrong answer is 5.",
        "reference answer: 5",
        "The student's answer is 5.",
        "Perhaps the answer is 5.",
        "I doubt whether the answer is 5.",
        "The answer is not 5.",
        r"the answer is \boxed{5",
        "<think>The answer is 5.</think> I am not sure.",
        "<think>The answer is 5.",
        "Therefore, the area is 12",
        "So what is 5?",
        "Thus, if x = 3, the area is 5.",
        "The length of AB is 10 cm.",
        "So the total must be thirty-one.",
        "#### 42\nand more",
    ],
)
def test_nothing_is_stated(response: str) -> None:
    """Questions, conditions, quotations, denials, sentences that were cut off, and work on the way."""
    found = find(response)
    assert found is None or not any(value in found for value in ("5", "10", "12", "42"))


@pytest.mark.parametrize(
    ("gold", "response", "answer"),
    [
        ("18", "She sells 9 eggs. The answer is $18.", "$18"),
        ("18", "The answer is **$18**.", "$18"),
        ("18", "The answer is $18", "$18"),
        ("1000", "The answer is $1,000.", "$1,000"),
        ("18.5", "The answer is $18.50.", "$18.50"),
        ("18", "The answer is $18 per day.", "$18 per day"),
        ("18", "The answer is $18. She sells 9 eggs for $2 each.", "$18"),
        ("18", "The answer is $18. $2 is the price of an egg.", "$18"),
        ("18", "The answer is $18\n\nCheck: 9 * $2 = $18", "$18"),
        ("18", "The answer is $18, since $9 \\cdot 2 = 18$.", "$18"),
        ("18", "## Final Answer\n\n$18", "$18"),
        ("18", "The answer is $18$.", "$18$"),
        ("18", "The answer is $x = 18$. She sells 9 eggs for $2 each.", "$x = 18$"),
        ("12", "The answer is $3! \\cdot 2$.", "$3! \\cdot 2$"),
        ("18", r"The answer is $18 \text{ dollars}$. She sells eggs.", r"$18 \text{ dollars}$"),
    ],
)
def test_a_dollar_sign_before_an_amount_may_be_currency(gold: str, response: str, answer: str) -> None:
    """It is, unless another closes it with nothing but mathematics between them."""
    decision = make_profiles(RewardConfig())["math"].decide(Item(golds=[gold], response=response, profile="math"))
    assert (decision.extracted, isinstance(decision, Finding) and decision.credit) == (answer, 1)


@pytest.mark.parametrize(
    "response",
    [
        "The answer is $18 or $20.",
        "The answer is $18. Wait, no, it is $20.",
        "The answer is $18. The answer is $20.",
        "The answer is:\n$18\n\n$20",
        "The answer is $18 + 2$.",
        "The answer is $18 + 2",
        "Is the answer $18?",
    ],
)
@pytest.mark.parametrize("gold", ["18", "20"])
def test_several_prices_are_several_answers(gold: str, response: str) -> None:
    """As without dollar signs, and unfinished work stays unfinished."""
    decision = make_profiles(RewardConfig())["math"].decide(Item(golds=[gold], response=response, profile="math"))
    assert isinstance(decision, Finding)
    assert decision.credit == 0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The final answer is **12** cm.", "12 cm"),
        ("The final answer is: __12__ cm.", "12 cm"),
        ("**The final answer is 12** cm.", "12 cm"),
        ("Therefore, x = **12**.", "x = 12"),
        ("Therefore, x = **12.**", "x = 12"),
        ("### Final Answer\n\nThe area is **12 cm²**.", "The area is 12 cm²"),
        ("### Final Answer\n\nThe area is **12 cm².**", "The area is 12 cm²"),
        ("Answer: `12` cm", "12 cm"),
        ("#### **12**", "12"),
        ("The answer is **$12$** cm.", "$12$ cm"),
    ],
)
def test_marks_of_emphasis_and_code_are_no_part_of_an_answer(response: str, answer: str) -> None:
    """Wherever in the sentence they stand."""
    decision = make_profiles(RewardConfig())["math"].decide(Item(golds=["12"], response=response, profile="math"))
    assert (decision.extracted, isinstance(decision, Finding) and decision.credit) == (answer, 1)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5}. The answer is 5.", "5"),
        (r"\boxed{\frac{1}{2}}. So the answer is 0.5.", r"\frac{1}{2}"),
        (r"\boxed{3\sqrt{2}}, so the final answer is about 4.24.", r"3\sqrt{2}"),
        (r"\boxed{12.566}. The final answer is 12.57.", "12.566"),
        (r"\boxed{5 \text{ cm}}" + "\nAnswer: 5", r"5 \text{ cm}"),
        (r"\boxed{5}. The answer is in the box above.", "5"),
        (r"\boxed{5}. The answer is B.", "5"),
        (r"\boxed{5}. If x is negative, the answer is 6.", "5"),
        (r"\boxed{5}. Therefore, the area is 20.", "5"),
        (r"\boxed{\frac{x}{x+1}}. The answer is $1-\frac{1}{x+1}$.", r"\frac{x}{x+1}"),
        (r"The answer is 4. No: \boxed{5}.", "5"),
        (r"\boxed{5}. Wait, that is the diameter. The final answer is 6.", "6"),
        (r"\boxed{5}" + "\n**Final answer:** 6", "6"),
        (r"\boxed{5}" + "\nAnswer: 6", "6"),
        (r"\boxed{5} <answer>6</answer>", "6"),
        (r"\boxed{5}. The final answer is 5 or 6.", "5 or 6"),
        (r"\boxed{5}, or the answer is 6.", "5 or 6"),
        (r"\boxed{5}. Alternatively, the answer is 6.", "5 or 6"),
        ("<answer>5</answer>\nThe final answer is 6.", "6"),
        ("**Final Answer:** The final answer is $x + 1$. I hope it is correct.", "$x + 1$"),
        ("Answer: 5. I hope it is correct.", "5"),
        ("Answer: no such point exists in the plane", "no such point exists in the plane"),
        (r"Put the answer in \boxed{}. The answer is 5.", "5"),
        ("The answer is 5. The answer is 6.", "5 or 6"),
        ("The answer is A or B.", "A or B"),
        ("The answer is 5, but it could be 6.", "5, but it could be 6"),
    ],
)
def test_which_of_several_answers_counts(response: str, answer: str) -> None:
    """The most formal one, unless a later one is another value; what is offered as a choice is all of it."""
    math = make_profiles(RewardConfig())["math"].decide(Item(golds=["unlikely"], response=response, profile="math"))
    assert math.extracted == answer


@pytest.mark.parametrize(
    "response",
    [
        "The answer is 4 or 5 or 6.",
        "The answer is 4. The answer is 5.",
        "The answer is 5. The answer is 6.",
        "The answer is 5 if x > 0, otherwise 6.",
        "The answer is 5, or else 6.",
        "The answer is 5, because x > 0, or 6 if not.",
        "The answer is 1, 2, 3, 4, 5, 6, 7, 8, 9.",
        "The answer is between 4 and 6.",
        "The answer is not 5.",
        "The answer is at most 5.",
        r"\boxed{5}. The final answer is 6.",
        r"\boxed{5}. The final answer is 5 or 6.",
        r"\boxed{6}" + "\n\nreference answer: 5",
        "What is the answer? If the answer is 5, write 5.",
        "Find x. Choices: (A) 4 (B) 5 (C) 6",
        "So the answer is 4, 5 or 6.",
        "Thus x = 5 or x = 6.",
        "The answer is > 5.",
        "The answer is 5 or so.",
        "The answer is:\n5\n6\n7",
        "The answer is:\n1. 4\n2. 5",
        "The answer is:\n5. 4\n6. 3",
        "## Final Answer\n\n$5$\n\n$6$\n",
        "## Final Answer\n- 5\n- 6",
        "The answer is 5\n6\n7",
        "#### 4 #### 5 #### 6",
        r"\boxed{5 = 6}",
        r"\boxed{5 = 5}",
        r"\boxed{2+3 = 5 \text{ or } 2+4 = 6}",
        r"\boxed{2+3}",
        "Thus x is 4 or x is 5.",
        "So AB is 4 and BC is 5.",
        "So the radius is 4 and the length of AB is 5.",
        "Thus the length is no more than what is 5.",
        "Thus a number greater than 4 is 5.",
        "So AB = 4 and BC is 5.",
        "The answer is 5, which is wrong.",
        "The answer is 5 which is incorrect; it is 6.",
        "The answer is 5, which equals 6.",
        "The answer is 5, which is not right.",
        "The answer is 5, which isn't what is asked.",
        "The answer is 5, where 6 is also the answer.",
        "The answer is 5, because that is wrong: it is 6.",
        "The answer is 5. Wait, no, it is 6.",
        "The answer is 5. Actually, 6.",
        "The answer is 5. More work follows, with words that lead on. The answer is 7. No, it is 6.",
    ],
)
def test_attacks_on_these_readings_earn_nothing(response: str) -> None:
    """Lists, hedges, contradictions, echoes of the prompt and sentences that only mention the gold answer."""
    math = make_profiles(RewardConfig())["math"]
    decision = math.decide(Item(golds=["5"], response=response, profile="math"))
    assert isinstance(decision, Finding)
    assert decision.credit == 0


@pytest.mark.parametrize(
    ("forms", "credits"),
    [("box", (1, 0, 0)), ("marks", (1, 1, 0)), ("words", (1, 1, 1))],
)
@pytest.mark.parametrize("profile", ["math", "geo3k"])
def test_a_recipe_chooses_the_forms(profile: str, forms: str, credits: tuple[int, ...]) -> None:
    """A box, a mark, a sentence."""
    config = RewardConfig.model_validate({"profiles": {profile: {"answers_in": forms}}})
    made = make_profiles(config)[profile]
    responses = (r"\boxed{5}", "Answer: 5", "The answer is 5.")
    decisions = [made.decide(Item(golds=["5"], response=each, profile=profile)) for each in responses]
    assert tuple(decision.credit for decision in decisions if isinstance(decision, Finding)) == credits


def test_geo3k_asks_for_marks_by_default() -> None:
    """Its recipes ask for a box."""
    decision = make_profiles(RewardConfig())["geo3k"].decide(
        Item(golds=["5"], response="The answer is 5.", profile="geo3k")
    )
    assert isinstance(decision, Finding)
    assert decision.status is Status.NO_ANSWER


_PIECES = [
    "the ",
    "answer",
    " is ",
    "5",
    ".",
    "\n",
    "## ",
    "So ",
    "$",
    r"\[",
    "or ",
    "**",
    "#### ",
    r"\boxed{",
    "}",
    "?",
]


@given(st.lists(st.sampled_from(_PIECES), max_size=60).map("".join))
def test_any_text_is_taken(response: str) -> None:
    """Whatever the text, the answer is a stripped part of it, or several parts joined."""
    answer = find(response)
    assert answer is None or (answer and answer == answer.strip())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "unit",
    [
        "answer ",
        "the answer is ",
        "The answer is 5. ",
        "the ",
        "## answer\n",
        "#",
        "$",
        "So x = ",
        ". ",
        " ",
        "\n",
        "is ",
        "**a",
        " **",
        "`",
        "__ a",
    ],
)
def test_statements_are_found_in_linear_time(unit: str) -> None:
    """A text of nothing but a troublesome piece takes less than a second; in quadratic time, many minutes."""
    text = (unit * 500_000)[:500_000]
    extract_answer(text, max_chars=len(text), forms=Forms.WORDS)


@pytest.mark.timeout(60)
def test_blanks_behind_a_statement_take_linear_time() -> None:
    """Half a million blanks in a sentence that does not end take no time; in quadratic time, many minutes."""
    assert find("The answer is 5" + " " * 500_000 + "x") is None
