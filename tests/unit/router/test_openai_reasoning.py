"""Reasoning is told from what is said, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.frontends.openai.reasoning import ReasoningReader, opens_thinking


def read(text: str, cuts: list[int], *, is_open: bool) -> tuple[str, str]:
    """Reasoning and content of the text in pieces."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    reader = ReasoningReader(is_open=is_open)
    spoken = [reader.add(text[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
    spoken.append(reader.finish())
    return "".join(each.reasoning for each in spoken), "".join(each.content for each in spoken)


CASES = [
    ("<think>\na b\n</think>\n\nc d", False, ("a b", "c d")),
    ("  <think>a</think>c", False, ("a", "c")),
    ("a b\n</think>\n\nc", True, ("a b", "c")),
    ("a b", True, ("a b", "")),
    ("a </think> b", False, ("", "a </think> b")),
    ("a <think>b</think>", False, ("", "a <think>b</think>")),
    ("<thin", False, ("", "<thin")),
    ("<think>a</thi", False, ("a</thi", "")),
    ("<think></think>c", False, ("", "c")),
    ("", False, ("", "")),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 30)))
def test_the_mark_parts_them(text: str, is_open: bool, expected: tuple[str, str], cuts: list[int]) -> None:
    """Only at the beginning of an answer, or where the prompt has opened it."""
    assert read(text, cuts, is_open=is_open) == expected


def test_a_prompt_that_opens_thinking_is_recognised() -> None:
    """By its end."""
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<think>\n\n</think>\n\n")
