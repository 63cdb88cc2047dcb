r"""The letter of a multiple choice: `B`, `(b)`, `\text{B}`, `option B`, `B. 90 cm`, and where a response chooses one.

Several letters are no choice: a list of all, `A or B`, `A. 5 B. 6`, `B, c, d`.
"""

import re

from services.reward.exact.extraction import are_side_by_side
from services.reward.exact.statements import Span, find_statements, is_unsure
from services.reward.exact.text.emphasis import read_plain
from services.reward.exact.text.normalisation import normalise

_LETTERED = re.compile(
    r"(?i:(?:the +)?(?:option|choice|answer) *:? *)?"
    r"(?:[(\[] *(?P<bracketed>[A-Za-z]) *[)\]]|(?P<capital>[A-Z])(?![A-Za-z'])|(?P<small>[a-z])$)"
    r"(?: *[.:,)\]-]+ *(?P<rest>.*)| +(?P<text>[^A-Za-z].*)|)",
    re.DOTALL,
)
_OTHERS = re.compile(
    r"^[(\[]?[A-J][)\].:]?$|\([A-J]\)|(?<![A-Za-z])[A-J][.):]|^(?:or|and|not|nor)\b"
    r"|(?:\b(?:or|and)\b|[,;/&]) *[(\[]?[A-J]\b(?! *[a-z])|^(?:which|where)\b.*\b(?:wrong|incorrect|not|also)\b"
)
"""Refuses text beside a letter that lists, joins or negates another in capitals, or denies the letter."""
_OTHER = re.compile(
    r"(?<![\w'\\])(?<!\\ )(?<![+*^])(?<![+*^] )(?:([A-Ja-j])(?= *(?:[.,:;)\]]|$))|([A-Jb-j])(?= +[-$(\\]*\d))"
    r"|(?<=\d) +(a)(?= +\d)|^ *[+*^/&|] *([A-Ja-j])(?!\w)"
)
"""A letter of another choice: in brackets, before `.`, `,`, `:` or a number, or at the end."""
_NAME = re.compile(
    r"\b(?:vitamin|hepatitis|type|group|class|grade|set|point|angle|line|side|segment|ray|vertex|plane|circle|region"
    r"|figure|graph|curve|city|town|train|car|team|box|bag|jar|container|plan|person)s? +[A-Ja-j]\b(?! *[.:)] *[^\s.])"
    r"|\\(?:angle|circ|triangle|odot|overline)(?![A-Za-z]) *[A-J]\b|(?<![A-Za-z])[A-Za-z]\([a-j]\)|\d *[ghJ]\b",
    re.IGNORECASE,
)
"""Matches a letter that is a name, an argument or a unit: `vitamin C`, `\\angle A`, `f(a)`, `5 g`. In `point c. 45` it
is a label, because text follows its mark."""
_LONE = re.compile(r"(?<![\w'])[A-J](?![\w'])")
_OPTION = r"(?:\\\(|\$)?[*_]{0,3}[(\[]?([A-J])[)\]]?[*_]{0,3}(?:\\\)|\$)?(?![\w'])"
_CHOOSES = re.compile(
    rf"\b[Oo]ption(?: +is|:) *{_OPTION}|\b[Cc]hoice(?: +is|:) *{_OPTION}"
    rf"|\b(?:[Cc]hoose|[Ss]elect|[Pp]ick|go with)(?: +(?:option|choice|answer))? +{_OPTION}"
    rf"|\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer) +{_OPTION} +is +(?:the +)?(?:correct|right)(?! +(?:for|if|when)\b)"
    rf"|(?<![\w\\]){_OPTION} +is +the +(?:correct|right) +(?:answer|option|choice|one)\b"
)
_JOINED = re.compile(
    r"(?:\s*(?:[,/&]|\b(?:and/or|or|and)\b)\s*(?:(?:or|and)\s+)?[*_`]{0,3}[(\[]?[A-J][)\]]?[*_`]{0,3}(?![\w']))++"
    r"(?=\s*(?:[.;:!?]|\b(?:because|since)\b|$))"
)
"""Matches, behind a chosen letter, others that are chosen with it and of which nothing is said."""
_LINE = re.compile(r"^[ \t>*_-]*+(\S.*)$", re.MULTILINE)
_MAX_CHOICES = 32
_MAX_CHARS = 512
_MAX_LINE_CHARS = 200


def read_letter(text: str) -> tuple[str, str] | None:
    """Return the letter of `text`, as a capital, and the text beside it; None if it is not exactly one letter."""
    if len(text) > _MAX_CHARS:
        return None
    plain = normalise(text.strip(" \t\n*_"))
    found = _LETTERED.fullmatch(plain)
    if found is None:
        return None
    letter = found["bracketed"] or found["capital"] or found["small"]
    rest = (found["rest"] or found["text"] or "").strip()
    return None if _OTHERS.search(rest) else (letter.upper(), rest)


def names_another(letter: str, rest: str) -> bool:
    """Return whether `rest`, which stands beside `letter`, names another choice too, in capitals or not."""
    found = _OTHER.finditer(_NAME.sub("0", rest))
    return any((other[1] or other[2] or other[3] or other[4]).upper() != letter for other in found)


def has_letters(text: str) -> bool:
    """Return whether `text` holds several letters of choices."""
    return len(set(_LONE.findall(text))) > 1


def find_choices(text: str) -> list[Span]:
    """Return where `text` chooses, in order: the stated answer, the option it calls right, or the last line."""
    stated = find_statements(text)
    letters = [span for span in stated if read_letter(span[2]) is not None or has_letters(span[2])]
    for choice in list(_CHOOSES.finditer(text))[-_MAX_CHOICES:]:
        if not is_unsure(text, choice.start()):
            letter = next(filter(None, choice.groups()))
            joined = _JOINED.match(text, choice.end())
            letters.append((choice.start(), choice.end(), letter if joined is None else letter + joined[0]))
    if letters:
        return _merged(text, sorted(letters))
    return stated or _last_line(text)


def _merged(text: str, spans: list[Span]) -> list[Span]:
    """Return `spans`, with those that name one letter twice, overlapping or side by side, as one."""
    merged = spans[:1]
    for start, end, content in spans[1:]:
        first, last_end, last_content = merged[-1]
        fuller = _fuller(last_content, content)
        if fuller is not None and are_side_by_side(text[last_end:start]):
            merged[-1] = (first, max(last_end, end), fuller)
        else:
            merged.append((start, end, content))
    return merged


def _fuller(first: str, second: str) -> str | None:
    """Return which of two contents says more; None if they differ in their letters or in the text beside them."""
    one, other = read_letter(first), read_letter(second)
    if one is None or other is None or one[0] != other[0] or (one[1] and other[1] and one[1] != other[1]):
        return None
    return first if one[1] or not other[1] else second


def _last_line(text: str) -> list[Span]:
    """Return the last line, if it is a letter and no other line is: a list of the options chooses none."""
    found = ((line.start(1), line.start(1) + len(line[1].rstrip())) for line in _LINE.finditer(text))
    lines = [
        (begin, end, read_plain(text, begin, end).rstrip(" *_"))
        for begin, end in found
        if end - begin <= _MAX_LINE_CHARS
    ]
    lettered = [line for line in lines if read_letter(line[2]) is not None or has_letters(line[2])]
    return lettered if len(lettered) == 1 and lettered[0] == lines[-1] else []
