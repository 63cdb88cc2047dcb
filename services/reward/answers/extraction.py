r"""Where in a response the answer is, found in time linear in the text.

What counts is the text after the last `</think>`; a `<think>` that is never closed leaves no answer. In it: the last
balanced `\boxed{}` (the outermost, where they are nested), else the last `<answer>` element, else the last line that
begins with `Answer:`. Boxes that are joined by "or", "and" or a comma are one answer, so that hedging does not pay.
"""

import re

_TOKEN = re.compile(r"\\boxed\s*(?P<open>\{)|\\boxed\s+(?P<bare>-?\d[\d.]*|[A-Za-z])|\\.|[{}]", re.DOTALL)
_JOINT = re.compile(r"[\s$]*(?:,|\bor\b|\band\b|\\text\s*\{\s*(?:or|and)\s*\})[\s$]*")
_ANSWER_LINE = re.compile(r"^[ \t*#]*(?:final +)?answer[ \t*]*:[ \t*]*(\S.*)$", re.IGNORECASE | re.MULTILINE)


def extract_answer(response: str, *, max_chars: int, answer_line: bool = True) -> str | None:
    """Return the answer as the response has it, stripped, or None if there is none.

    Args:
        response: The policy's own text.
        max_chars: Only the last `max_chars` characters are searched for the answer.
        answer_line: Whether a line `Answer: ...` counts where there is neither box nor `<answer>`.
    """
    closed = response.rfind("</think>")
    if response.rfind("<think>") > closed:
        return None
    start = max(len(response) - max_chars, closed + len("</think>") if closed >= 0 else 0)
    text = response[start:]
    answer = _boxed(text)
    if answer is None:
        answer = _tagged(text)
    if answer is None and answer_line:
        lines = _ANSWER_LINE.findall(text)
        answer = lines[-1] if lines else None
    return (answer or "").strip() or None


def _boxed(text: str) -> str | None:
    """The content of the last box, and of those that it is joined to."""
    first = text.find("\\boxed")
    if first < 0:
        return None
    boxes: list[tuple[int, int, str]] = []  # start, end, content: outermost boxes in the order of their ends
    open_braces: list[tuple[int, int] | None] = []  # start of a box and of its content; None for a plain brace
    for token in _TOKEN.finditer(text, first):
        if token["open"]:
            open_braces.append((token.start(), token.end()))
        elif token["bare"]:
            boxes.append((token.start(), token.end(), token["bare"]))
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces:
            opened = open_braces.pop()
            if opened is not None:
                while boxes and boxes[-1][0] > opened[0]:
                    boxes.pop()
                boxes.append((opened[0], token.end(), text[opened[1] : token.start()]))
    if not boxes:
        return None
    joined = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _JOINT.fullmatch(text, box[1], joined[-1][0]):
            break
        joined.append(box)
    return " or ".join(content for _, _, content in reversed(joined))


def _tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None
