r"""Normalises spelling: Unicode signs, LaTeX layout and synonyms, spaces, thousands separators.

Nothing here computes; the text stays LaTeX. Every rewrite takes time linear in the text.
"""

import re
import unicodedata

_SIGNS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "𝜋": r"\pi ", "𝝅": r"\pi ", "°": r"^\circ ", "º": r"^\circ ",
    "˚": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F", "∞": r"\infty ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ",
    "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≅": r"\cong ", "≃": r"\approx ",
    "∼": r"\sim ", "∥": r"\parallel ", "⊥": r"\perp ", "∠": r"\angle ", "△": r"\triangle ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "ℝ": r"\mathbb{R}", "∅": r"\emptyset ", "∴": "", "→": r"\to ", "⇒": r"\to ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "φ": r"\phi ", "λ": r"\lambda ",
    "μ": r"\mu ", "∶": ":", "：": ":", "，": ",", "、": ",", "。": ".", "′": "'", "″": "''", "’": "'", "‘": "'",
    "“": '"', "”": '"', "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "…": "...", "⋯": "...",
    "\u00a0": " ", "\u202f": r"\,", "\u2009": r"\,", "\u2008": r"\,", "\u200a": r"\,",
}  # fmt: skip
_COMMANDS = {
    # layout
    **dict.fromkeys(
        ("left", "right", "displaystyle", "textstyle", "scriptstyle", "big", "Big", "bigl", "bigr", "Bigl", "Bigr",
         "bigg", "Bigg", "biggl", "biggr", "limits", "nolimits", "therefore", "mathstrut", "boxed", "fbox", "bf", "rm",
         "it", "tiny", "small", "normalsize", "large", "Large", "LARGE", "huge", "Huge", "checkmark"), ""
    ),
    **dict.fromkeys(("quad", "qquad", "thinspace", "enspace", "space", "hspace"), " "),
    # synonyms
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "over": "/", "tbinom": r"\binom", "dbinom": r"\binom",
    "leq": r"\le", "leqslant": r"\le", "geq": r"\ge", "geqslant": r"\ge", "lt": "<", "gt": ">", "neq": r"\ne",
    "degree": r"^\circ", "percent": r"\%", "ast": "*", "colon": ":", "mid": "|", "vert": "|", "lvert": "|",
    "rvert": "|",
    "lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")", "lbrack": "[", "rbrack": "]", "lparen": "(",
    "rparen": ")", "prime": "'", "infin": r"\infty", "simeq": r"\approx", "thickapprox": r"\approx",
    "varnothing": r"\emptyset",
    "measuredangle": r"\angle", "lor": " or ", "vee": " or ", "land": " and ", "wedge": " and ", "bigcup": r"\cup",
    "ldots": "...", "dots": "...", "cdots": "...", "dotsc": "...", "varphi": r"\phi", "varepsilon": r"\epsilon",
    "pounds": "£", "euro": "€", "rightarrow": r"\to", "implies": r"\to", "Rightarrow": r"\to", "mathring": "",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_STYLE = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|mbox|hbox|operatorname\*?|boxed|fbox"
    r"|emph|underline) *\{([^{}]*)\}"
)
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|[~\s]+")
_LAYOUT = re.compile(r"\\[()\[\]!]|(?<!\\)\$")
_SUPERSCRIPT = re.compile(r"\^ *\{ *\^? *\\circ *\}|\^ *\^? *\\circ(?![A-Za-z])")
_COLOUR = re.compile(r"\\(?:text)?color *\{[^{}]*\}|\\[hv]?phantom *\{[^{}]*\}|\\[hv]space\*? *\{[^{}]*\}")
_NOT_EQUAL = re.compile(r"\\not *=")
_ARC = re.compile(r"\\(?:overset|stackrel) *\{ *\\(?:small|big)?frown *\}|\\(?:over|wide)paren(?![A-Za-z])")
_CASES = re.compile(r"(?:\\left *\\\{ *)?\\begin *\{cases\}([^&]*)\\end *\{cases\}(?: *\\right *\.)?")
_PLAIN = re.compile(r"-?(?:\d{1,3}|\d{5,30})(?:\.\d+)?", re.ASCII)
_BARE = re.compile(r"(?=[^\\]*\\)(?:[0-9 {}^-]|\\(?:sqrt|frac|pi)(?![A-Za-z]))*+")
"""Matches numbers that need no rewriting."""
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\, ?|\\;|\\ |\{ *, *\})\d{3})+(?![\d])(?!\}? *,\d)", re.ASCII)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d]|,\d)", re.ASCII)
_DIGIT = re.compile(r"\d")
_SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_WORD = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|ln|log|infty|infinity|inf|oo|theta|degrees?|deg)(?![A-Za-z])")
_WORDS = {"infinity": r"\infty ", "inf": r"\infty ", "oo": r"\infty ", "degrees": r"^\circ ", "degree": r"^\circ ",
          "deg": r"^\circ "}  # fmt: skip
_ROOT = re.compile(r"([√∛∜]) *(\d+(?:\.\d+)?|\\pi|[a-z]|(?=[({\\]))")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_ASCII_RELATIONS = (
    ("<=", r"\le "),
    (">=", r"\ge "),
    ("!=", r"\ne "),
    ("=<", r"\le "),
    ("+/-", r"\pm "),
    ("+-", r"\pm "),
)
_REASON = re.compile(
    r"(?:,|(?<=[\d}) ])\() *(?:since|because|rounded|to the nearest)\b(?:(?! (?:or|wrong|incorrect)\b)[^;])*$"
)
_ABOUT = re.compile(
    r"(?:(?<=[\d})])|(?<=\\pi)),?(?P<bracket> *\()? *(?:\bor +)?"
    r"\b(?:approximately|approx\.?|roughly|about)(?= *[-\d\\.])"
)
_BRACKETED_ABOUT = re.compile(r" *\( *(?:or +)?\\approx *([^()]*)\)$")
_LEAD = re.compile(r"(?:[=:;,]|\\approx|\\to|\\sim(?= *\d)|~|[Aa]pprox(?:imately|\.)? +(?=[-\d\\.])) *")


def normalise(text: str, *, join_thousands: bool = True) -> str:
    """Return the answer `text` in one spelling.

    Args:
        text: An answer.
        join_thousands: Whether `1,000` is a thousand; else it is 1 and 0.
    """
    text = text.strip()
    if _PLAIN.fullmatch(text):
        return text
    if _BARE.fullmatch(text):
        return " ".join(text.split())
    if not (text.isascii() and text.isprintable()):
        text = _plain_signs(text)
    if "\\" in text or "$" in text or "~" in text or "{" in text:
        text = _plain_latex(text)
    for relation, command in _ASCII_RELATIONS:
        if relation in text and (relation != "+-" or not re.search(r"[\w)}] *\+-", text)):
            text = text.replace(relation, command)
    if join_thousands and "," in text and not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(_digits, text)
    text = _WORD.sub(lambda word: _WORDS.get(word[1], f"\\{word[1]}"), text)
    text = " ".join(text.split())
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    if "o" in text:
        text = _BRACKETED_ABOUT.sub(r" \\approx \1", _ABOUT.sub(r"\g<bracket> \\approx ", text))
    if " " in text and (reason := _REASON.search(text)) is not None and _DIGIT.search(text, 0, reason.start()):
        text = text[: reason.start()].rstrip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    lead = _LEAD.match(text)
    if lead is not None:
        text = text[lead.end() :]
    return text.strip()


def _plain_latex(text: str) -> str:
    """Remove LaTeX layout, and use one command for each meaning."""
    text = (
        text.replace(r"\$", r"\dollar ")
        .replace(r"\-", "")
        .replace(r"\/", "")
        .replace(r"\&", " and ")
        .replace("{:}", ":")
        .replace("{.}", ".")
    )
    if "\\not" in text:
        text = _NOT_EQUAL.sub(r"\\ne ", text)
    if "\\frown" in text or "paren" in text:
        text = _ARC.sub(r"\\widehat", text)
    if "{cases}" in text:
        text = _CASES.sub(_lines, text)
    if "olor" in text or "phantom" in text or "space" in text:
        text = _COLOUR.sub("", text)
    text = _GROUPED.sub(_digits, text)
    for _ in range(8):
        unwrapped = _STYLE.sub(r" \1 ", text)
        if unwrapped == text:
            break
        text = unwrapped
    text = _LAYOUT.sub("", text)
    text = _COMMAND.sub(_one_command, text)
    if "\\begin" not in text:
        text = text.replace("\\\\", " ")
    text = _SPACE.sub(" ", text)
    return _SUPERSCRIPT.sub(r"^\\circ ", text) if "\\circ" in text else text


def _one_command(match: re.Match[str]) -> str:
    found = _COMMANDS.get(match[1])
    if found is None:
        return match[0]
    return (
        found + " "
        if found[:1] == "\\"
        and found[-1:].isalpha()
        and match.end() < len(match.string)
        and (match.string[match.end()].isalpha())
        else found
    )


def _lines(match: re.Match[str]) -> str:
    """Join the lines of a system, which has no cells."""
    return ", ".join(line.strip(" ,") for line in match[1].split("\\\\"))


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _plain_signs(text: str) -> str:
    """Replace common Unicode signs by ASCII and LaTeX; replace non-text characters by U+FFFD or drop them."""
    out: list[str] = []
    raised = False
    for char in text:
        if " " <= char <= "~":
            raised = False
            out.append(char)
            continue
        category = unicodedata.category(char)
        decomposition = unicodedata.decomposition(char)
        if char in _SIGNS:
            out.append(_SIGNS[char])
        elif char in _ROOTS:
            out.append(char)
        elif "！" <= char <= "～":  # full-width forms of ASCII
            out.append(chr(ord(char) - 0xFEE0))
        elif category == "No" and (fraction := unicodedata.normalize("NFKC", char).split("\u2044"))[1:]:
            out.append(rf"\frac{{{fraction[0]}}}{{{fraction[1]}}}")
        elif decomposition.startswith("<super> ") and (plain := unicodedata.normalize("NFKC", char)) in "0123456789n−-":
            exponent = plain.replace("−", "-")
            if raised:
                out[-1] = out[-1][:-1] + exponent + "}"
            else:
                out.append(f"^{{{exponent}}}")
            raised = True
            continue
        elif decomposition.startswith("<sub> ") and (plain := unicodedata.normalize("NFKC", char)).isalnum():
            out.append(f"_{{{plain}}}")
        elif decomposition.startswith("<font> "):  # mathematical letters and digits
            out.append(unicodedata.normalize("NFKC", char))
        elif category == "Cs":
            out.append("\ufffd")
        elif category.startswith("Z") or char in "\t\n\r":
            out.append(" ")
        elif category not in {"Cc", "Cf"}:
            out.append(char)
        raised = False
    text = "".join(out)
    if any(sign in text for sign in _ROOTS):
        text = _ROOT.sub(lambda found: _ROOTS[found[1]] + (f"{{{found[2]}}}" if found[2] else ""), text)
    return text
