r"""Finds the answer in a response, in time linear in the text.

Only the text after the last `</think>` counts; a `<think>` that is never closed leaves no answer. In that text: the
last balanced `\boxed{}` or `\fbox{}` (the outermost, if nested), wherever it stands, else the last `<answer>` element,
else the last line that begins with `Answer:`, or, if words count, a sentence that states an answer. A later answer of a
less formal kind replaces it if the two contradict.

Hedging does not pay: boxes (elements, lines, sentences) that stand side by side are one answer with several values.
They are side by side if hardly a word is between them (signs, labels, "or", "vs"), or a few words that offer a choice
("; option two: ") and none that correct ("but rechecking gives"). The same content twice counts once.
"""

import enum
import re
from collections.abc import Callable, Sequence

from services.reward.exact.statements import Span, find_statements
from services.reward.exact.text.emphasis import drop_emphasis, read_plain
from services.reward.exact.text.end_of_text import drop_end_of_text

_BOX = re.compile(
    r"\\(?:boxed|fbox)(?:\s*+(?P<open>\{)|\s*+(?P<bare>-?\d[\d.]*+)|\s++(?P<letter>[A-Za-z])(?![A-Za-z]))"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TOKEN = re.compile(rf"{_BOX.pattern}|{_BRACE.pattern}", re.DOTALL)
_MARKUP = re.compile(r"\\[A-Za-z]++(?: *\{[lcr|]*\})?|</?[A-Za-z]++[^<>]{0,20}>|\d++(?:st|nd|rd|th)")
_WORD = re.compile(r"[A-Za-z]{2,}+")
_LABEL = re.compile(
    r"\b(?:answer|option|case|possibility|candidate|guess|alternative|choice|variant|version|#) *"
    r"(?:\d|one|two|three|four|five|[A-E]\b)",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(
    r"\b(?:x?or|either|else|alternative\w*|possib\w+|perhaps|may|maybe|might|could|can|otherwise|options?|candidate|guess"
    r"|also|another|other|second|both|if|case|when|depending|respectively|versus|vs|even)\b",
    re.IGNORECASE,
)
_OFFER = re.compile(r"\b(?:or|also|maybe|perhaps|possibly|alternatively)\b[^A-Za-z]*$", re.IGNORECASE)
_CORRECTION = re.compile(
    r"\b(?:but|actually|wait|instead|no|not|rather|correct\w*|(?:re-?)?check\w*|(?:re-?)?comput\w*|hence|therefore|thus|so"
    r"|final(?:ly)?|then|next|now|step|sorry|mistake\w*|scratch|oops)\b",
    re.IGNORECASE,
)
_MAX_SIDE_WORDS = 3
_MAX_CHOICE_CHARS = 120
_MAX_ELEMENTS = 16
_ANSWER_LINE = re.compile(
    r"^[ \t*#>_-]*+(?:(?:the|my|final) +){0,2}+answer[ \t*_]*+:[ \t*_`]*+(\S.*)$", re.IGNORECASE | re.MULTILINE
)


class Forms(enum.StrEnum):
    """The forms in which an answer counts; each includes those before it."""

    BOX = "box"
    MARKS = "marks"
    """Also `<answer>` and `Answer:`."""
    WORDS = "words"
    """Also sentences that state the answer."""


Finder = Callable[[str], list[Span]]
"""Finds answers of one form, in order."""


def extract_answer(
    response: str,
    *,
    max_chars: int,
    forms: Forms = Forms.MARKS,
    stated: Finder = find_statements,
    contradicts: Callable[[str, str], bool] = str.__ne__,
) -> str | None:
    """Return the answer as the response has it, stripped, or None if there is none.

    Args:
        response: The policy's own text. End-of-text tokens and white space at its end are no part of it.
        max_chars: Only the last `max_chars` characters are searched for the answer.
        forms: The forms in which an answer counts.
        stated: Finds answers that are stated in a sentence.
        contradicts: Whether the second answer, which comes later in a less formal form, takes back the first.
    """
    response = drop_end_of_text(response)
    closed = response.rfind("</think>")
    if response.find("<think>", closed + 1) >= 0:
        return None
    start = max(len(response) - max_chars, closed + len("</think>") if closed >= 0 else 0)
    text = response[start:] if start else response
    finders: list[Finder] = [_boxes]
    if forms is not Forms.BOX:
        finders += [_elements, _lines if forms is Forms.MARKS else lambda text: stated(text) or _lines(text)]
    for number, find in enumerate(finders):
        spans = find(text)
        if not any(span[2].strip() for span in spans):
            continue  # a response repeats empty boxes from its prompt
        answer = _last_of(text, spans).strip()
        later = _later(text, spans[-1][1], finders[number + 1 :])
        if later is not None and answer and contradicts(answer, later[2]):
            between = text[spans[-1][1] : later[0]]
            is_choice = len(between) <= _MAX_CHOICE_CHARS and _offers_choice(between)
            answer = f"{answer} or {later[2]}" if is_choice else later[2]
        return answer or None
    return None


def _later(text: str, position: int, finders: Sequence[Finder]) -> Span | None:
    """Return the last answer of these forms from `position` on."""
    found = sorted(span for find in finders for span in find(text) if span[0] >= position and span[2].strip())
    spans = [span for number, span in enumerate(found) if not number or span[0] >= found[number - 1][1]]
    return (spans[-1][0], spans[-1][1], _last_of(text, spans).strip()) if spans else None


def _lines(text: str) -> list[Span]:
    """Return the lines that begin with `Answer:`, in order."""
    return [
        (line.start(), line.end(), read_plain(text, line.start(1), line.end()).rstrip(" \t*_`"))
        for line in _ANSWER_LINE.finditer(text)
    ]


def _boxes(text: str) -> list[Span]:
    """Return the outermost boxes in order."""
    boxes: list[Span] = []
    position = 0
    while (box := _BOX.search(text, position)) is not None:
        if not box["open"]:
            boxes.append((box.start(), box.end(), box["bare"] or box["letter"]))
            position = box.end()
            continue
        end = _closing_brace(text, box.end())
        if end is None:
            boxes.extend(_boxes_in_open_one(text, box.start()))
            break
        boxes.append((box.start(), end, text[box.end() : end - 1]))
        position = end
    return boxes


def _elements(text: str) -> list[Span]:
    """Return the last few `<answer>` elements in order."""
    elements: list[Span] = []
    start = len(text)
    while len(elements) < _MAX_ELEMENTS:
        end = text.rfind("</answer>", 0, start)
        start = text.rfind("<answer>", 0, max(end, 0))
        if start < 0:
            break
        content = drop_emphasis(text[start + len("<answer>") : end])
        elements.append((start, end + len("</answer>"), content.strip()))
    return elements[::-1]


def _last_of(text: str, spans: list[Span]) -> str:
    """Return the content of the last of `spans`, and of those beside it."""
    start, _, content = spans[-1]
    contents = {content: None}  # a dictionary, to keep order
    for begin, end, content in reversed(spans[:-1]):
        if not are_side_by_side(text[end:start]):
            break
        start = begin
        contents[content] = None
    return " or ".join(reversed(contents))


def are_side_by_side(between: str) -> bool:
    """Return whether the text on both sides of `between` is offered as one answer."""
    if len(between) > _MAX_CHOICE_CHARS:
        return False
    if _offers_choice(between):
        return True
    if _CORRECTION.search(between):
        return False
    return len(_WORD.findall(_MARKUP.sub(" ", between))) <= _MAX_SIDE_WORDS


def _offers_choice(between: str) -> bool:
    """Return whether words of this text, such as `or`, `option two`, offer both sides, and none corrects."""
    if _LABEL.search(between) or _OFFER.search(between):
        return True
    return _ALTERNATIVE.search(between) is not None and _CORRECTION.search(between) is None


def _closing_brace(text: str, position: int) -> int | None:
    """Return the position after the brace that closes the one opened just before `position`; None if there is none."""
    depth = 1
    for brace in _BRACE.finditer(text, position):
        sign = brace[0]
        if sign == "{":
            depth += 1
        elif sign == "}":
            depth -= 1
            if not depth:
                return brace.end()
    return None


def _boxes_in_open_one(text: str, start: int) -> list[Span]:
    """Return the outermost closed boxes from `start`, where a box opens that is never closed."""
    boxes: list[Span] = []
    open_braces: list[tuple[int, int] | None] = []  # start of a box and of its content; None for a plain brace
    for token in _TOKEN.finditer(text, start):
        sign = token[0]
        if sign == "{":
            open_braces.append(None)
        elif sign == "}":
            opened = open_braces.pop() if open_braces else None
            if opened is not None:
                while boxes and boxes[-1][0] > opened[0]:
                    boxes.pop()
                boxes.append((opened[0], token.end(), text[opened[1] : token.start()]))
        elif token["open"]:
            open_braces.append((token.start(), token.end()))
        elif token["bare"] or token["letter"]:
            boxes.append((token.start(), token.end(), token["bare"] or token["letter"]))
    return boxes
