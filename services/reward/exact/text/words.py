r"""Answers in language: the letter of a choice, the name of a figure, a time of day, words."""

import re

_CHOICE = re.compile(r"(?:(?:option|choice|answer)\s*)?(?:\( ?([A-Z]) ?\)|([A-Z]))[.:)]?", re.IGNORECASE)
_CHOICE_WITH_REST = re.compile(
    r"(?:(?:option|choice) *)?(?:\( ?([A-J]) ?\)|([A-J])[.:)])[.:]? *(?![-+*/^=<>_ ])(?P<rest>.+)"
)
_WORDS = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,.'\"%:;!?()/-]*")
_LETTERS = re.compile(r"[A-Za-z]{4,}|[A-Za-z]+ +[A-Za-z]+", re.IGNORECASE)
_SHORT_WORD = re.compile(r"[a-z]{3}|no|hl", re.IGNORECASE)
_NAMED_FIGURE = re.compile(
    r"(?:m *)?\\(angle|triangle|overline|overrightarrow|overleftrightarrow|widehat|arc|odot) *\{? *([A-Z]{1,6}|\d) *\}?"
)
_TWO_WAYS = frozenset({"angle", "overline", "overleftrightarrow", "widehat", "arc"})
"""Figures whose points may be read from either end."""
_BASED = re.compile(r"(\d+) ?_ ?\{? ?(\d{1,2}) ?\}?", re.ASCII)
_ARTICLE = re.compile(r"\b(?:the|a|an)\b")
_CLOCK = re.compile(r"(\d{1,2}:\d\d) *([AaPp])\.? ?[Mm]\.?")


def read_choice(text: str) -> str | None:
    """Return the letter of `B`, `(B)`, `(b)`, `B.`, `option B`; a small letter on its own is a variable."""
    choice = _CHOICE.fullmatch(text)
    if choice is None or not (choice[1] or choice[2].isupper()):
        return None
    return (choice[1] or choice[2]).upper()


def read_lettered(text: str) -> tuple[str, str] | None:
    """Return the letter of `(B) 5` or `B. 5`, and the text beside it."""
    choice = _CHOICE_WITH_REST.fullmatch(text)
    return None if choice is None else (choice[1] or choice[2], choice["rest"])


def read_short_name(text: str) -> str | None:
    r"""Return a short word, a figure with its points, or a number in a base: `SAS`, `\triangle ABC`, `101_2`."""
    based = _BASED.fullmatch(text)
    if based is not None:
        return f"{based[1]} in base {based[2]}"
    if _SHORT_WORD.fullmatch(text):
        return text.casefold()
    figure = _NAMED_FIGURE.fullmatch(text)
    if figure is None:
        return None
    points = min(figure[2], figure[2][::-1]) if figure[1] in _TWO_WAYS else figure[2]
    return f"{figure[1]} {points.casefold()}"


def read_clock(text: str) -> str | None:
    """Return a time of day with `a.m.` or `p.m.`."""
    clock = _CLOCK.fullmatch(text)
    return None if clock is None else f"{clock[1]} {clock[2].lower()}m"


def is_plain(text: str) -> bool:
    """Return whether `text` is written in letters, digits and punctuation."""
    return _WORDS.fullmatch(text) is not None


def read_words(text: str) -> str | None:
    """Return plain language in lower case, without articles and punctuation."""
    if not (is_plain(text) and _LETTERS.search(text)):
        return None
    words = _ARTICLE.sub(" ", re.sub(r"[^a-z0-9/%. -]", " ", text.casefold()))
    return " ".join(words.strip(" .").split())
