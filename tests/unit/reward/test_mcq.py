"""The profile `mcq`: which letter a response chooses, and what chooses none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.exact.text.letters import find_choices, read_letter
from services.reward.item import Item
from services.reward.profiles.profile import Undecided
from services.reward.profiles.registry import make_profiles
from services.reward.verdict import Finding, Method

PROFILE = make_profiles(RewardConfig())["mcq"]


def judge(response: str, *golds: str) -> Finding:
    """What the profile finds by itself."""
    decision = PROFILE.decide(Item(golds=golds, response=response, profile="mcq"))
    assert isinstance(decision, Finding)
    return decision


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{B}", r"\boxed{b}", r"\boxed{(B)}", r"\boxed{\text{B}}", r"\boxed{\textbf{(B)}}",
        r"\boxed{\text{Option B}}",
        r"\boxed{B. 90^\circ}", r"\boxed{\text{(B) } 90}", "<answer>B</answer>", "Answer: B", "**Answer:** (B)",
        "The answer is B.", "The correct answer is **(B) 90**.",
        "So the final answer is (B), because AB is parallel to CD.",
        "Option B is correct.", "(B) is the correct choice.", "The correct option is B", "I choose (B).",
        "Option A is not correct. Option B is correct.", "Of (A) 60 and (B) 90, the answer is (B).",
        "B", "(B)", "**B**", "B. 90", "The angles add up to 180.\n\nB", "<think>A, or C</think>B",
        r"\boxed{A}. Wait, I took the wrong angle. The final answer is B.", r"\boxed{90}. The answer is B.",
        "The answer is A. But that was too quick, since it is the outer angle that counts. The answer is B.",
    ],
)  # fmt: skip
def test_the_letter_is_found(response: str) -> None:
    """In a box, behind a mark, in words, or alone on the last line."""
    finding = judge(response, "B")
    assert (finding.status, finding.credit, finding.method) == (Status.OK, 1, Method.STRUCTURE)
    assert judge(response, "(B)").credit == judge(response, "b").credit == 1
    assert judge(response, "A").credit == judge(response, "C").credit == 0


@pytest.mark.parametrize(
    "response",
    [
        "Therefore, the correct option is (B).", "So the correct choice is (B).",
        "Therefore, the correct option is B: 12.", "The correct answer is (B). I choose (B).",
        "The correct answer is option B. Option B is correct.", "Option B is correct. The answer is (B) 12.",
        "I choose (A). Therefore, the correct option is (B).", "The answer is **(B)** 12 cm.",
        r"Hence, the correct option is \(B\).", "**B)** 12 cm",
    ],
)  # fmt: skip
def test_a_letter_that_is_named_twice_is_one_choice(response: str) -> None:
    """In one sentence or in two side by side; a last line in mathematics or emphasis chooses too."""
    assert judge(response, "B", "12").credit == judge(response, "B").credit == judge(response, "B. 12 cm").credit == 1
    assert judge(response, "A", "12").credit == judge(response, "A").credit == 0


@pytest.mark.parametrize(
    "response",
    [
        "The correct answer is (A). I choose (B).", "Therefore, the correct option is (A) or (B).",
        "I choose (A). I choose (B). I choose (B).",
    ],
)  # fmt: skip
def test_two_letters_side_by_side_stay_two(response: str) -> None:
    """Whether or not one of them is named twice."""
    assert judge(response, "B").credit == judge(response, "A").credit == 0


@pytest.mark.parametrize(
    "response",
    [
        "The correct option is A or B.", "Therefore, the correct option is (A) or (B).", "I choose A or B.",
        "Therefore, the correct option is A and C.", "I choose A, B, C or D.", "The correct option is A/B",
        "I choose **A** and **B**.", "I choose A or B because both fit.", "I choose A and/or B.", "I choose A or\nB.",
        r"Hence, the correct option is \(A\).\nHence, the correct option is \(B\).".replace(r"\n", "\n"),
        "Hence, the correct option is $A$.\nHence, the correct option is $B$.",
    ],
)  # fmt: skip
def test_letters_that_are_chosen_together_are_no_choice(response: str) -> None:
    """Not of the first one either."""
    assert judge(response, "A").credit == judge(response, "B").credit == 0


@pytest.mark.parametrize(
    "response",
    [
        "I choose A, and B is wrong.", "The correct option is A. B and C are wrong.", "I choose A, or 5 cm.",
        "I choose A, as C has no solution.", "I choose A, B and C are wrong.", "I choose A, B/C fail.",
        "Option A is correct, and C, D are not.",
    ],
)  # fmt: skip
def test_what_is_said_of_other_letters_takes_nothing_away(response: str) -> None:
    """Only the chosen one counts."""
    assert judge(response, "A").credit == 1


def test_the_text_beside_a_letter_that_is_named_twice_counts() -> None:
    """The value that the fuller of the two has is compared, and two values are two answers."""
    for response in ("Therefore, the correct option is B: 13.", "I choose B. The answer is (B) 13."):
        assert judge(response, "B. 12").credit == 0
        assert judge(response, "B. 13").credit == 1
    assert judge("The answer is (B) 12. The answer is (B) 13.", "B. 12").credit == 0


@pytest.mark.parametrize(
    "response",
    [
        "ABCD", "A B C D", "A, B, C, D", r"\boxed{ABCD}", r"\boxed{A, B, C, D}", r"\boxed{A B C D}", r"\boxed{A/B/C/D}",
        r"\boxed{A \text{ or } B}", r"\boxed{A \text{ and } B}", r"\boxed{A}\boxed{B}", r"\boxed{B} or \boxed{A}",
        "The answer is A or B.", "The answer is B or A.", "The answer is A. The answer is B.", "A\nB", "B\nA",
        "<answer>A</answer><answer>B</answer>", "Answer: A\nAnswer: B", "Answer: A, B",
        "The answer is:\nB\nC", "## Answer\nB\nA",
        "A. 60\nB. 90\nC. 45\nD. 30", "(A) 60 (B) 90 (C) 45 (D) 30", "A) 60 B) 90",
        "The answer is one of (A) 60 (B) 90.", r"\boxed{\text{A. 60, B. 90}}",
        r"\boxed{B}. Wait, the final answer is A.", r"\boxed{B}. The answer is A or B.",
        "If x > 0, the answer is B.", "Is the answer B?", "The wrong answer is B.", "Option B is not correct.",
        "I would pick B if x > 0.", "Choose A, B, C or D.", r"\boxed{\text{not B}}",
        "<think>B</think>", "I cannot tell.",
        "The answer is B, which is wrong.", "The answer is B. Wait, no, it is C.",
        "The answer is B. Wait, no, C is right.",
        r"\boxed{6}", r"\boxed{\text{all of them}}", r"\boxed{AB}",
    ],
)  # fmt: skip
def test_attacks_choose_nothing(response: str) -> None:
    """Lists of letters, hedges, contradictions, options repeated from the prompt."""
    assert judge(response, "B").credit == 0


@pytest.mark.parametrize(
    ("response", "credit"),
    [
        (r"\boxed{90}", 1),
        (r"\boxed{x = 90^\circ}", 1),
        ("The answer is 90.", 1),
        (r"\boxed{\text{B. } 90}", 1),
        (r"\boxed{60}", 0),
        (r"\boxed{\text{B. } 60}", 0),
        (r"\boxed{\text{A. } 90}", 0),
        (r"\boxed{90 \text{ or } 60}", 0),
        (r"\boxed{90}. The answer is A.", 0),
    ],
)
def test_the_value_of_the_choice_counts_where_the_row_gives_it(response: str, credit: float) -> None:
    """As a gold answer of its own or behind the letter. A letter beside another choice's value is wrong."""
    assert judge(response, "B", "90").credit == judge(response, "B. 90").credit == credit


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{B, c, d}", r"\boxed{B. (c) (d)}", r"\boxed{B. (a)}", r"\boxed{B 5 C 6}", r"\boxed{B. 5 c. 6}",
        r"\boxed{B = C}", r"\boxed{B + C}", r"\boxed{B. 5 or c}", "The answer is B, c, or d.", r"\boxed{b) 5 c) 6}",
        r"\boxed{B. 5 cm c 6 cm}", r"\boxed{B: 5 a 6}", r"\boxed{b/c}", r"\boxed{B, C}",
        r"\boxed{B. point c. 45}", r"\boxed{B. set c) 45}", r"\boxed{B. point C. 45}",
    ],
)  # fmt: skip
def test_a_second_letter_is_refused_in_any_case(response: str) -> None:
    """A small letter is one too, in brackets, before a mark or a number, or at the end."""
    assert judge(response, "B").credit == judge(response, "B. 5").credit == 0


@pytest.mark.parametrize(
    "rest",
    [
        "vitamin C", "hepatitis B", "point A", r"25^\circ C", r"\angle A", "5 g", "a man", "a 90 degree angle", "a + b",
        "f(a)", "2a", "AB = CD", r"\frac{a}{b}", "The cell divides", "point A.", "point c 45",
    ],
)  # fmt: skip
def test_a_letter_in_the_text_of_a_choice_is_none(rest: str) -> None:
    """An article, a variable in an expression, a unit, a name."""
    assert judge(rf"\boxed{{B. {rest}}}", "B").credit == 1


@pytest.mark.parametrize("rest", ["a", "(a)", "x = a", "a and c", "5 c"])
def test_a_letter_that_the_gold_choice_has_counts(rest: str) -> None:
    """The same text is refused where the gold answer is the letter alone."""
    assert judge(rf"\boxed{{B. {rest}}}", f"B. {rest}").credit == 1
    assert judge(rf"\boxed{{B. {rest}}}", "B").credit == 0


@pytest.mark.parametrize(
    ("response", "credit"),
    [
        (r"\boxed{B. 13 or 14}", 0), (r"\boxed{B. 13, 14}", 0), (r"\boxed{B. x = 13}", 0),
        (r"\boxed{B. 12 or 13}", 0), (r"\boxed{B. (12, 13)}", 0), (r"\boxed{B. 12 = 13}", 0), (r"\boxed{B. 1:2}", 0),
        (r"\boxed{B. x = 12}", 1), (r"\boxed{B. 12}", 1), (r"\boxed{B. 12 cm}", 1), (r"\boxed{B. twelve}", 1),
    ],
)  # fmt: skip
def test_every_value_beside_a_letter_must_be_the_choices(response: str, credit: float) -> None:
    """Lists, names and equalities too."""
    assert judge(response, "B. 12").credit == judge(response, "B", "12").credit == credit
    assert judge(response, "B. x = 12").credit == credit


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("(3, 4)", ["(3, 4)", "3, 4", "x = 3, y = 4", "the point (3, 4)"], ["(3, 5)", "3", "P(3, 5)", "5 or (3, 4)"]),
        (r"\{3, 4\}", [r"\{4, 3\}", "3 and 4"], [r"\{3, 5\}", "7"]),
        ("1:2", ["1:2", "2:4"], ["1:3"]),
        ("[1, 3]", ["[1, 3]"], ["[1, 4]", "2"]),
    ],
)
def test_a_value_of_any_kind_is_compared_beside_its_letter(gold: str, right: list[str], wrong: list[str]) -> None:
    """Tuples, sets, ratios and intervals, as numbers."""
    for credit, rests in ((1, right), (0, wrong)):
        found = {rest: judge(rf"\boxed{{B. {rest}}}", f"B. {gold}").credit for rest in rests}
        assert found == dict.fromkeys(rests, credit)
        assert found == {rest: judge(rf"\boxed{{B. {rest}}}", "B", gold).credit for rest in rests}


@pytest.mark.parametrize(
    ("response", "golds", "status"),
    [
        ("I cannot tell.", ["B"], Status.NO_ANSWER),
        (r"\boxed{A, B}", ["B"], Status.UNPARSEABLE),
        (r"\boxed{" + "B" * 600 + "}", ["B"], Status.TOO_LARGE),
        (r"\boxed{B}", ["90"], Status.GOLD_INVALID),
        (r"\boxed{B}", ["A, B"], Status.GOLD_INVALID),
        (r"\boxed{B}", [], Status.GOLD_INVALID),
    ],
)
def test_statuses(response: str, golds: list[str], status: Status) -> None:
    """A row whose gold answer is no letter is the data's fault, not the policy's."""
    assert judge(response, *golds).status is status


def test_a_recipe_may_ask_for_the_box() -> None:
    """Then words do not count."""
    strict = make_profiles(RewardConfig.model_validate({"profiles": {"mcq": {"answers_in": "box"}}}))["mcq"]
    decisions = [
        strict.decide(Item(golds=["B"], response=each, profile="mcq")) for each in (r"\boxed{B}", "The answer is B.")
    ]
    assert [each.credit for each in decisions if isinstance(each, Finding)] == [1, 0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", [" ", "\t", "*", "_", "-", "> ", "5", "(", "\n", "option ", "B or ", "answer: "])
def test_choices_are_found_in_linear_time(unit: str) -> None:
    """Half a million characters of a troublesome piece take seconds at most; in quadratic time, many minutes."""
    find_choices((unit * 500_000)[:500_000])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", [r"\begin{cases}", ", since "])
def test_a_long_text_is_no_letter(unit: str) -> None:
    """A box may be as long as the response; bringing it into one spelling would take minutes."""
    assert read_letter("B. " + unit * 60_000 + ";") is None


_PIECES = [
    "A",
    "B",
    "(",
    ")",
    ".",
    ", ",
    " or ",
    "answer is ",
    "Answer: ",
    "\n",
    r"\boxed{",
    "}",
    "Option ",
    "90",
    "**",
    "`",
    "option is ",
    "I choose ",
    r"\(B\)",
]


@given(st.lists(st.sampled_from(_PIECES), max_size=40).map("".join), st.sampled_from(["A", "B", "A. 90"]))
def test_no_response_is_right_for_two_letters(response: str, gold: str) -> None:
    """Whatever is written, it is right for one choice at most, and there is always a verdict."""
    decisions = [PROFILE.decide(Item(golds=[each], response=response, profile="mcq")) for each in (gold, "C", "A", "B")]
    assert all(isinstance(each, Finding | Undecided) for each in decisions)
    assert sum(isinstance(each, Finding) and each.credit == 1 for each in decisions[1:]) <= 1
