"""Where the answer is found in a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.exact.extraction import Forms, extract_answer


def _extract(response: str) -> str | None:
    return extract_answer(response, max_chars=65536)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{5}.", "5"),
        (r"First \boxed{5}, then I see that it is \boxed{6}.", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 5$", "5"),
        (r"$\boxed{\boxed{5}}$", r"\boxed{5}"),
        (r"\boxed{5} or \boxed{6}", "5 or 6"),
        (r"$\boxed{5}$, $\boxed{6}$", "5 or 6"),
        (r"\boxed{4} and so \boxed{5", "4"),
        (r"} \boxed{3} {", "3"),
        (r"<think>\boxed{4}</think>\boxed{5}", "5"),
        (r"no tag was opened: \boxed{4}</think> \boxed{5}", "5"),
        ("<answer> 12 </answer>", "12"),
        (r"<answer>12</answer> \boxed{13}", "13"),
        ("Some words.\nAnswer: 5 cm\n", "5 cm"),
        ("**Final answer:** 8", "8"),
        ("Answer: 4\nAnswer: 5", "4 or 5"),
        ("Answer: 4\nNo, that is the diameter.\nAnswer: 5", "5"),
        ("**Answer: 8**", "8"),
        ("Answer: `8`", "8"),
        ("- Answer: 8", "8"),
        ("Answer: **8** cm", "8 cm"),
        ("**Answer: 8** cm", "8 cm"),
        ("**Answer:** **8** cm", "8 cm"),
        ("Answer: `8` cm", "8 cm"),
        ("Answer: x = **8**", "x = 8"),
        ("Answer: ***8*** cm", "8 cm"),
        ("Answer: x = **`8`** cm", "x = 8 cm"),
        ("Answer: __8__ cm", "8 cm"),
        ("Answer: 2**3", "2**3"),
        ("Answer: 2 ** 3 ** 2", "2 ** 3 ** 2"),
        ("Answer: (2)**(3) + (4)**(5)", "(2)**(3) + (4)**(5)"),
        ("Answer: **2**3", "2**3"),
        ("Answer: a__b__c", "a__b__c"),
        (r"\boxed{**8**}", "**8**"),
        ("<answer>**8**</answer>", "8"),
        ("<answer>The length is **8** cm</answer>", "The length is 8 cm"),
        ("<answer>8</answer> or <answer>**8**</answer>", "8"),
        (r"\fbox{5}", "5"),
        (r"<answer>so \boxed{5}</answer>", "5"),
        (r"\boxed{4} <answer>5</answer>", "5"),
        (r"$\boxed{5}$" + "\n\n" + r"$\boxed{5}$", "5"),
        (r"\boxed{5} \boxed{6}", "5 or 6"),
        (r"\boxed{5}\text{ or }\boxed{6}", "5 or 6"),
        (r"either \boxed{5}, or perhaps \boxed{6}", "5 or 6"),
        (r"Option one: \boxed{5}; option two: \boxed{6}", "5 or 6"),
        ("Answer 1: \\boxed{5}\nAnswer 2: \\boxed{6}", "5 or 6"),
        (r"I got \boxed{5}, or so I thought; but rechecking gives \boxed{6}", "6"),
        (r"\boxed{5} or something." + " More work." * 10 + r" So \boxed{6}", "6"),
        (r"x = \boxed{5}. Then y = \boxed{6}.", "6"),
        ("Step 1: \\boxed{5}\nStep 2: \\boxed{6}", "6"),
        (r"\boxed{5}}}}", "5"),
        ("1. \\boxed{5}\n2. \\boxed{6}", "5 or 6"),
        ("| A | \\boxed{5} |\n| B | \\boxed{6} |", "5 or 6"),
        (r"\boxed{5}. It could also be \boxed{6}.", "5 or 6"),
        (r"Maybe \boxed{5}. No wait, or \boxed{6}", "5 or 6"),
        (r"\boxed{5} \boxed{6} \boxed{5}", "6 or 5"),
        (r"\boxed{5} vs. \boxed{6} vs. \boxed{7}", "5 or 6 or 7"),
        ("\\boxed{5}\n\n**Final Answer**\n\n\\boxed{6}", "6"),
        (r"The side is \boxed{5}, and therefore the area is \boxed{6}", "6"),
        (r"The area is \boxed{20}. The question, though, asks for the perimeter, which is \boxed{18}", "18"),
        ("<answer>5</answer> or <answer>6</answer>", "5 or 6"),
        ("<answer>5</answer> But I forgot a side. <answer>6</answer>", "6"),
        (r"\boxed{\boxed{4}", "4"),
        ("Answer: 5<|im_end|>", "5"),
        ("Answer: 5 cm</s>\n<|endoftext|><|endoftext|>", "5 cm"),
        ("<answer>5</answer><eos>", "5"),
        ("Answer: 5 </s> 6", "5 </s> 6"),
    ],
)
def test_the_answer_is_found(response: str, answer: str) -> None:
    """The last balanced box, <answer> or Answer: line after </think>; a later one that differs takes the place."""
    assert _extract(response) == answer


@pytest.mark.parametrize(
    "response",
    [
        "",
        "no answer here",
        r"\boxed{}",
        r"\boxed{  }",
        r"\boxed{5",
        r"<think>So \boxed{5}.</think> I am not sure.",
        r"<think>So \boxed{5}. But wait",
        r"\boxed{5}</think>\boxed{6}<think> again",
        "the answer is 5",
    ],
)
def test_there_is_no_answer(response: str) -> None:
    """Empty and open boxes, thoughts, and a thought that never ends hold no answer."""
    assert _extract(response) is None


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The answer is $12$.<|im_end|>", "$12$"),
        (r"\boxed{12}. No, the answer is 5.<|im_end|>" + "\n", "5"),
        ("Therefore, AB is 12 cm.<|eot_id|>", "12 cm"),
        ("#### 12<|end_of_text|>", "12"),
    ],
)
def test_end_of_text_tokens_belong_to_no_sentence(response: str, answer: str) -> None:
    """Trainers that keep special tokens send the end-of-text token with the response."""
    assert extract_answer(response, max_chars=100, forms=Forms.WORDS) == answer


def test_a_box_may_be_all_that_counts() -> None:
    """Then neither an <answer> nor an Answer: line does, and none of them takes a box back."""
    assert extract_answer("<answer>5</answer>\nAnswer: 5", max_chars=100, forms=Forms.BOX) is None
    assert extract_answer("\\boxed{4}\nAnswer: 5", max_chars=100, forms=Forms.BOX) == "4"


def test_only_the_end_of_a_long_response_is_searched() -> None:
    """What is further from the end than the limit is not seen; end-of-text tokens and white space are no part of it."""
    assert extract_answer(r"\boxed{5}" + "." * 100, max_chars=100) is None
    assert extract_answer(r"\boxed{5}" + "<|endoftext|>\n" * 100, max_chars=100) == "5"
    assert extract_answer(" " * 10_000 + r"\boxed{5}", max_chars=100) == "5"


_PIECES = ["\\", r"\boxed", "{", "}", " ", "5", "$", "or", "<think>", "</think>", "\n", "answer:", "<answer>"]


@given(st.lists(st.sampled_from(_PIECES)).map("".join))
def test_any_text_is_taken(response: str) -> None:
    """Whatever the text, extraction returns a stripped part or None."""
    answer = _extract(response)
    assert answer is None or (answer and answer == answer.strip())


@given(prefix=st.text(), answer=st.text(alphabet="0123456789abc+-^_ ", min_size=1).filter(str.strip))
def test_a_box_at_the_end_is_found_after_any_text(prefix: str, answer: str) -> None:
    """What stands before the last box does not hide it."""
    prefix = prefix.replace("\\", "").replace("<", "")
    assert _extract(f"{prefix}. So: \\boxed{{{answer}}}") == answer.strip()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "unit",
    [
        "{",
        "}",
        r"\boxed{",
        r"\boxed ",
        r"\boxed{5},",
        "\\",
        "Answer:",
        "\n",
        "<answer>",
        "answer: *",
        "$",
        " ",
        "</think>",
        "<think",
        "**a",
        " **",
        "`",
        "Answer: **",
        "</s>\n",
        "a</s>",
    ],
)
def test_extraction_takes_linear_time(unit: str) -> None:
    """Two million characters of nothing but a troublesome piece take a second; in quadratic time, hours."""
    text = (unit * 2_000_000)[:2_000_000]
    extract_answer(text, max_chars=len(text))
