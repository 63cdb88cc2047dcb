r"""The spelling that graders descended from MATH compare first, including its oddities.

The rules are those of the MATH benchmark's `math_equivalence`, in the version of openai/prm800k (math_normalize.py,
MIT), which slime (rm_hub/math_utils.py, `mathd_normalize_answer`) and MathRuler 0.1.0 (math_normalize.py) both carry.
Pure text, in time linear in the answer.
"""

import re

_TEXT = re.compile(r"^\\text\{(.+?)\}$")
_REWRITES = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
    ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
)  # fmt: skip
_INTEGER_RATIO = re.compile(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)")


class _MalformedError(ValueError):
    """The rules do not fit the text, which then stays as it is."""


def normalise(answer: str, *, strip_percent: bool) -> str:
    """Return the spelling of `answer`.

    Args:
        answer: A gold answer, or a response's.
        strip_percent: Whether to remove a bare `%` too (MathRuler), and not only `\\%` (slime).
    """
    answer = answer.strip()
    enclosed = _TEXT.search(answer)
    if enclosed is not None:
        answer = enclosed[1].strip()
    try:
        return _respell(answer, strip_percent)
    except _MalformedError:
        return answer


def unwrap_text(answer: str) -> str:
    r"""Return `answer` without the `\text{}` that encloses it."""
    enclosed = _TEXT.search(answer)
    return answer if enclosed is None else enclosed[1]


def _respell(text: str, strip_percent: bool) -> str:
    for old, new in _REWRITES:
        text = text.replace(old, new)
    text = _without_unit(text).replace("\\%", "")
    if strip_percent:
        text = text.replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text.startswith("."):
        text = f"0{text}"
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _with_braced_fractions(_with_braced_roots(text).replace(" ", ""))
    if text == "0.5":
        return r"\frac{1}{2}"
    ratio = _INTEGER_RATIO.fullmatch(text)
    return text if ratio is None else rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}"


def _without_unit(text: str) -> str:
    r"""Remove a unit, which a single `\text{ ` begins."""
    value, *units = text.split(r"\text{ ")
    if len(units) > 1:
        raise _MalformedError
    return value


def _with_braced_roots(text: str) -> str:
    r"""Turn `\sqrt3` into `\sqrt{3}`."""
    before, *radicands = text.split(r"\sqrt")
    if "" in radicands:
        raise _MalformedError
    return before + "".join(
        rf"\sqrt{radicand}" if radicand[0] == "{" else rf"\sqrt{{{radicand[0]}}}{radicand[1:]}"
        for radicand in radicands
    )


def _with_braced_fractions(text: str) -> str:
    r"""Turn `\frac12` and `\frac1{72}` into `\frac{1}{2}` and `\frac{1}{72}`; change nothing if one is cut short."""
    parts, *fractions = text.split(r"\frac")
    for fraction in fractions:
        if not fraction:
            raise _MalformedError
        if fraction[0] == "{":
            parts += rf"\frac{fraction}"
        elif len(fraction) == 1:
            return text
        elif fraction[1] == "{":
            parts += rf"\frac{{{fraction[0]}}}{fraction[1:]}"
        else:
            parts += rf"\frac{{{fraction[0]}}}{{{fraction[1]}}}{fraction[2:]}"
    return parts
