r"""Answers that a response states in a sentence, without a box; found in time linear in the text.

    The final answer is $0.5$. I hope it is correct.        ## Final Answer
    #### 42                                                 $$x = 5$$
    Therefore, the length of AB is 10 cm.

A sentence states an answer if it says "answer" and what it is. Where none does, the last line counts if it is GSM8K's
`#### 42`, or ends in a sentence that concludes (therefore, thus, so) with one name and its value. Conditions,
questions, guesses and denials state nothing, and neither do words with nothing behind them ("the answer is clear")
beside values.

Lists of words that veto a statement, by where they stand:

    before "the answer is"          _UNSURE: if, suppose, maybe, said          no statement
    before "is" of a conclusion     _NO_NAME: or, than, at most, a value       no statement
    at the start of the answer      _DENIAL: not, neither, unknown             no statement
    in a reason after the answer    _OTHERWISE: or, unless, wrong, a value     the reason stays: unreadable, or several
    after the sentence              _SECOND_THOUGHT: wait, no, actually        the next other value stands beside it
    between answers                 extraction._ALTERNATIVE, _CORRECTION       joined, or the last counts
"""

import re

from services.reward.exact.text.emphasis import drop_emphasis, read_plain

Span = tuple[int, int, str]
"""Start, end and content."""

_LEAD = re.compile(
    r"(?<![\w\\])(?:(?:the|my|our|final|correct|right|exact|required|desired|numerical|simplified) +){0,4}+answer"
    r"(?: +to +(?:the|this) +(?:question|problem))?[*_]{0,3}"
    r"(?: *+(?:[:=]|\bequals\b)| *+\bmust be\b| *+\bis(?![\w'’])"
    r"(?: +(?:therefore|thus|then|hence|simply|just|indeed|now))?+"
    r"(?: +(?:equal +to|given +by|approximately|about))?+ *+:?)[*_]{0,3}",
    re.IGNORECASE,
)
_ARTICLE = re.compile(r"(?:the|my|our) ", re.IGNORECASE)
_HEADING = re.compile(
    r"^[ \t]*+(?:#{1,6} *+|\*\*|__)[ \t*_]*+(?:the +)?(?:final +)?(?:answer|result)[ \t*_:]*+$",
    re.IGNORECASE | re.MULTILINE,
)
_GRADE_SCHOOL = re.compile(r"#{4} *+(\S[^\n]{0,199})")
_CONCLUSION = re.compile(
    r"(?:therefore|thus|hence|so|consequently|finally|in conclusion|it follows that|we (?:get|find|conclude))\b,? *+"
    r"(?:(?:we (?:get|find|conclude|have)|it follows|that|then)\b:?,? *+){0,3}+(.+)",
    re.IGNORECASE | re.DOTALL,
)
_SAYS = re.compile(r"\b(?:is|equals|measures)\b")
_SAID_VALUE = re.compile(r"(?: +(?:equal +to|exactly|simply))?+:? +(?=[^a-z ]|[a-z]\b|\\)(.+)", re.DOTALL)
_NO_NAME = re.compile(
    r"\b(?:or|than|at most|at least|between|up to|exceeds?|what)\b|(?<!angle )(?<!angle)(?<![\w.])\d|[=<>≤≥≠√½¼¾⅓⅔]"
    r"|\\(?:leq?|geq?|neq?|lt|gt|d?frac|sqrt|pm|approx)(?![A-Za-z])",
    re.IGNORECASE,
)
"""Matches text before `is` that is no name: a further subject, a comparison, another value."""
_SPACE = re.compile(r"[\s*_:]*+")
_LIST_MARK = re.compile(r"(?:[-*•]|\d{1,2}[.)]) +")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_MATH = {"$$": "$$", r"\[": r"\]", r"\(": r"\)", "$": "$"}
_OPENING = re.compile(r"\$\$?|\\[\[(]")
_AMOUNT = re.compile(r"\$\d[\d,]*+(?:\.\d+)?")
_ARGUMENT = re.compile(r"\\[A-Za-z]+\*? *\{[^{}]*\}")
_PROSE = re.compile(r"[.?]\s|\n\s*\n|(?<![\\A-Za-z])[A-Za-z]{3,}")
"""Matches, outside of `_ARGUMENT`, what stands between the prices of two sentences and not in mathematics."""
_SENTENCE_END = re.compile(r"[.!?](?=[\"')*_\]]*+(?:\s+[^a-z\s]|\s*+$))|\n")
_BOUNDARY = re.compile(r"[.!?:;](?=\s)|\n")
_REASON = re.compile(
    r"(?P<reason>,? +(?:because|since|as (?:required|desired|shown|needed))|, +(?:and +)?so)\b.*"
    r"|,? +(?:which|where)\b.*",
    re.DOTALL,
)
_OTHERWISE = re.compile(r"\b(?:or|else|otherwise|unless|if|maybe|perhaps|wrong|incorrect|wait|actually|also)\b")
_OTHER_VALUE = re.compile(r"\d|[=<>≤≥≠√½¼¾⅓⅔]|\\[A-Za-z]|\b(?:not|never|false)\b|n['’]t\b")
"""Matches a clause with `which` or `where` that may deny the answer, or give another one."""
_SECOND_THOUGHT = re.compile(
    r"[.!;,\s*_$)]*+(?:(?:but|oh|hmm|well),? +)?(?:wait|no|actually|sorry|oops|correction)\b(?! +doubt\b)",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\d(?:[\d.,]*\d)?|(?<![\w\\])[A-HJ](?![\w'])")
_GOES_ON = re.compile(
    r"(?:^|[,(]|\b(?:so|thus|therefore|hence|then|and|that|is|but|or|wait|no))[\s*_#>\"'(]*$", re.IGNORECASE
)
"""Matches text that may stand before an answer without an article; a `reference answer` is not the response's."""
_UNSURE = re.compile(
    r"\b(?:if|whether|suppos\w+|assum\w+|unless|could|might|may|maybe|perhaps|possibl\w+|probably|example|e\.g|guess\w*"
    r"|wrong|incorrect|given|says?|said|claim\w*|when|either|would|unlikely|unsure|not|never|cannot|don't)\b",
    re.IGNORECASE,
)
_DENIAL = re.compile(r"(?:not|never|no longer|neither|nor|unknown|unclear|wrong|incorrect)\b", re.IGNORECASE)
_VALUE = re.compile(
    r"\d|\\(?!text|quad|,|;)[A-Za-z]+|[π√∞½¼¾⅓⅔°]|^[\s$*(\[{\\]*[A-Za-z][\s$*).\]}\\]*$|[\w)] *[-+*/^=<>] *[\w(]"
    r"|\([A-Z]\)"
)
_MARK = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])|</?answer>|<think>")
_TRIM = ' \t\n*_"`'
_MAX_CHARS = 200
_MAX_STATEMENTS = 32
_MAX_WORDS = 4


def find_statements(text: str) -> list[Span]:
    """Return the last answers that `text` states, in order."""
    found = [*_sentences(text), *_headings(text)]
    spans = [_with_second_thought(text, span) for span in sorted(found) if not _MARK.search(span[2])]
    values = [span for span in spans if _VALUE.search(span[2])]
    return values or spans or _last_line(text)


def _with_second_thought(text: str, span: Span) -> Span:
    """Return `span`, with the other number or letter that the words right after it correct it to, if there is one."""
    start, end, content = span
    thought = _SECOND_THOUGHT.match(text, end, end + _MAX_CHARS)
    if thought is None:
        return span
    known = set(_TOKEN.findall(content))
    behind = text[thought.end() : thought.end() + _MAX_CHARS]
    other = next((token for token in _TOKEN.findall(behind) if token not in known), None)
    return span if other is None else (start, end, f"{content} or {other}")


def _sentences(text: str) -> list[Span]:
    """Return the answers that sentences state."""
    spans = []
    for lead in list(_LEAD.finditer(text))[-_MAX_STATEMENTS:]:
        before = _before(text, lead.start())
        if _UNSURE.search(before) or not (_ARTICLE.match(lead[0]) or _GOES_ON.search(before)):
            continue
        content, end = read_value(text, lead.end())
        if content and not _LEAD.match(content):  # Final answer: The final answer is 5
            spans.append((lead.start(), end, content))
    return spans


def is_unsure(text: str, position: int) -> bool:
    """Return whether the sentence at `position` begins with a condition, a guess or a denial."""
    return _UNSURE.search(_before(text, position)) is not None


def _before(text: str, position: int) -> str:
    """Return the sentence up to `position`."""
    before = text[max(0, position - _MAX_CHARS) : position]
    boundaries = [boundary.end() for boundary in _BOUNDARY.finditer(before)]
    return before[boundaries[-1] if boundaries else 0 :]


def _headings(text: str) -> list[Span]:
    """Return the answers below `## Final Answer`."""
    spans = []
    for heading in list(_HEADING.finditer(text))[-_MAX_STATEMENTS:]:
        content, end = read_value(text, heading.end())
        if content and not _LEAD.match(content):
            spans.append((heading.start(), end, content))
    return spans


def read_value(text: str, position: int) -> tuple[str, int]:
    """Return the statement from `position` to the end of the sentence, and that end; "" if it states nothing."""
    space = _SPACE.match(text, position)
    assert space is not None, "it matches anything"
    begin = space.end()
    if "\n\n\n" in space[0]:
        return "", position
    if "\n" in space[0] and (mark := _LIST_MARK.match(text, begin)) is not None:
        begin = mark.end()
    behind = begin
    opening = _OPENING.match(text, begin)
    if opening is not None:  # a full stop inside mathematics does not end the sentence
        closing = text.find(_MATH[opening[0]], opening.end(), begin + _MAX_CHARS)
        if not _is_price(text, begin, closing):
            if closing < 0:
                return "", position
            behind = closing + len(_MATH[opening[0]])
    stop = _SENTENCE_END.search(text, behind, begin + 2 * _MAX_CHARS)
    end = len(text) if stop is None else stop.start()
    if end - begin > _MAX_CHARS or (stop is not None and stop[0] == "?"):
        return "", position
    content = read_plain(text, begin, end).strip(_TRIM)
    reason = _REASON.search(content)
    if reason is not None and not _takes_back(reason):
        content = content[: reason.start()].rstrip(_TRIM)
    if _DENIAL.match(content):
        return "", position
    if not _VALUE.search(content):
        return (content, end) if len(content.split()) <= _MAX_WORDS else ("", position)
    others, end = _lines_of_values(text, end)
    return " or ".join((content, *others)), end


def _is_price(text: str, begin: int, closing: int) -> bool:
    """Return whether `text` has an amount in dollars at `begin`: the next `$`, at `closing`, does not close it."""
    if _AMOUNT.match(text, begin) is None:
        return False
    return closing < 0 or _PROSE.search(_ARGUMENT.sub(" ", text[begin:closing])) is not None


def _takes_back(reason: re.Match[str]) -> bool:
    """Return whether the text after an answer denies it, or may give another."""
    return bool(_OTHERWISE.search(reason[0]) or (reason["reason"] is None and _OTHER_VALUE.search(reason[0])))


def _lines_of_values(text: str, position: int) -> tuple[list[str], int]:
    """Return the lines after `position` that are only a value each, and where they end: a list is one answer."""
    found: list[str] = []
    line_end = text.find("\n", position)
    if line_end < 0 or text[position:line_end].strip(_TRIM + ".!"):
        return found, position
    end = position
    while 0 <= line_end < len(text) and len(found) < _MAX_STATEMENTS:
        begin = line_end + 1
        line_end = text.find("\n", begin, begin + _MAX_CHARS)
        line = drop_emphasis(text[begin : line_end if line_end >= 0 else begin + _MAX_CHARS]).strip(_TRIM + "#.")
        mark = _LIST_MARK.match(line)
        line = line if mark is None else line[mark.end() :]
        if line and (_MARK.search(line) or _LONG_WORD.search(line) or not _VALUE.search(line)):
            break
        if line:
            found.append(line)
            end = line_end if line_end >= 0 else min(begin + _MAX_CHARS, len(text))
    return found, end


def _last_line(text: str) -> list[Span]:
    """Return the answer at the end of the last line, if it is stated without the word "answer"."""
    whole = text.rstrip()
    begin = whole.rfind("\n") + 1
    line = drop_emphasis(whole[begin:])
    school = _GRADE_SCHOOL.fullmatch(line)
    if school is not None:
        return [(begin, len(whole), school[1])] if _VALUE.search(school[1]) else []
    if len(line) > 4 * _MAX_CHARS:
        return []
    ends = [end.end() for end in _SENTENCE_END.finditer(line)]
    if not ends or ends[-1] != len(line) or line.endswith("?"):
        return []  # cut off, perhaps in the middle of a number
    last = line[ends[-2] if len(ends) > 1 else 0 : -1].strip(_TRIM)
    conclusion = _CONCLUSION.fullmatch(last)
    if conclusion is None or _UNSURE.search(last) or _MARK.search(last):
        return []
    said = conclusion[1]
    says = list(_SAYS.finditer(said))
    if len(says) > 1 or (says and _NO_NAME.search(said, 0, says[0].start())):
        return []
    value = _SAID_VALUE.fullmatch(said, says[0].end()) if says else None
    if value is None and "=" not in said:
        return []
    content = said.strip(_TRIM) if value is None else value[1].strip(_TRIM)
    return [(begin, len(whole), content)] if len(content) <= _MAX_CHARS and _VALUE.search(content) else []
