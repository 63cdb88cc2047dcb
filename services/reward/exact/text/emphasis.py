"""Markdown's marks of emphasis and code inside an answer: `**12** cm` is `12 cm`. Linear in the text.

Only marks that open and close are dropped; `2**3`, `(a)**(b)` and `2 ** 3` keep theirs, since a mark that opens has no
digit, letter or bracket before it and no space behind it, and one that closes the reverse.
"""

import re

_EDGE, _END = r"(?<![\w*_`)}\]])", r"(?![\w*_`({\[\\$])"
_MARKS = (
    (r"\*{2,3}", r"[^\s*]", r"[^*\n]|\*(?!\*)"),
    (r"_{2,3}", r"[^\s_]", r"[^_\n]|_(?!_)"),
    ("`", r"[^\s`]", r"[^`\n]"),
)
"""Each mark, what may stand beside it on the inner side, and what between two of them."""
_PAIRS = tuple(
    re.compile(rf"{_EDGE}({mark})(?={side})((?:{inner})++)(?<={side})\1{_END}") for mark, side, inner in _MARKS
)
_LONE = tuple((re.compile(mark), re.compile(rf"(?<={side}){mark}{_END}")) for mark, side, _ in _MARKS)
"""Each mark anywhere, and where it closes."""
_BEHIND_STOP = re.compile(r"[.!?]([*_`]{1,3})(?!\w)")
_MAX_CHARS = 200


def drop_emphasis(text: str) -> str:
    """Return `text` without pairs of `**`, `__` and backticks around something on one line."""
    if "**" not in text and "__" not in text and "`" not in text:
        return text
    for pair in _PAIRS:
        text = pair.sub(r"\2", text)
    return text


def read_plain(text: str, begin: int, end: int) -> str:
    """Return `text[begin:end]` without emphasis, which may open before `begin` or close behind a full stop."""
    content = text[begin:end]
    behind = _BEHIND_STOP.match(text, end)
    if behind is not None:
        content += behind[1]
    before = text[max(text.rfind("\n", max(begin - _MAX_CHARS, 0), begin) + 1, begin - _MAX_CHARS) : begin]
    for mark, closing in _LONE:
        first = mark.search(content)
        if first is not None and len(mark.findall(before)) % 2 and closing.match(content, first.start()):
            content = content[: first.start()] + content[first.end() :]
    return drop_emphasis(content)
