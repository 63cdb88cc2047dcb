r"""Reads answers as trees: names, tuples, sets, alternatives, intervals, choices, ratios, matrices, words.

Reading splits at signs outside of brackets and never evaluates. It is bounded: the depth of brackets and the number of
parts are limited, and every split is linear.
"""

import re

from services.reward.exact.formulas import num_formulas
from services.reward.exact.intervals import (
    intersect,
    read_bracketed_interval,
    read_complement,
    read_inequality,
    read_set_builder,
    unite,
)
from services.reward.exact.names import (
    SYMBOL,
    canonical_name,
    is_comparison,
    is_name,
    is_quantity,
)
from services.reward.exact.nodes import (
    Chain,
    Choice,
    Equation,
    Interval,
    Intervals,
    Matrix,
    Named,
    Node,
    Opaque,
    Ratio,
    Relation,
    Scalar,
    Set,
    Tuple,
    Words,
)
from services.reward.exact.numbers.algebra import NoValueError, TooLargeError, add, has_variables, negate
from services.reward.exact.numbers.grammar import MAX_DEPTH, MAX_DIGITS
from services.reward.exact.numbers.number import Number, read_common, read_number
from services.reward.exact.numbers.units import split_unit
from services.reward.exact.text.brackets import closes, split, squeeze
from services.reward.exact.text.words import (
    is_plain,
    read_choice,
    read_clock,
    read_lettered,
    read_short_name,
    read_words,
)

MAX_PARTS = 64
_MAX_LEVELS = 4
_MAX_CHARS = 2048

_STRUCTURAL = re.compile(
    r"[,;:=<>&\[\]]|^[({]|\\\{|\\(?:pm|mp|le|ge|ne|in|cup|cap|approx|begin|cong|sim|parallel|perp|equiv|to)(?![A-Za-z])"
    r"|\b(?:or|and|U)\b|\bto\b"
)
_SEPARATOR = re.compile(r"[,;]|\b(?:or|and)\b")
_POINT = re.compile(r"([A-Z]'?) *(\([^()]*,[^()]*\))")
_COMMA = re.compile("[,;]")
_EQUALITY = re.compile(r"\\(?:approx|equiv)(?![A-Za-z])|(?<![<>!:])=")
_INEQUALITY = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]")
_CUP = re.compile(r"\\cup(?![A-Za-z])|\bU\b")
_LINE = re.compile(r"\\(?:overline|overleftrightarrow)(?![A-Za-z])")
_RELATION = re.compile(r"\\(cong|sim|parallel|perp)(?![A-Za-z])")
_COLON = re.compile(r":|\\to(?![A-Za-z])|\bto\b")
_IN = re.compile(r"\\in(?![A-Za-z])")
_SIGN = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_MATRIX = re.compile(
    r"\\begin ?\{ ?([pbB]?matrix|array|smallmatrix) ?\}(?: ?\{[lcr| ]*\})?(.*)\\end ?\{ ?\1 ?\}", re.DOTALL
)
_SENTENCE = re.compile(r"(.{1,64}?) is (?:equal to |about |approximately )?(.+)", re.DOTALL)
_BRACKETED_MATRIX = re.compile(r"[(\[] *(\\begin ?\{ ?(?:array|matrix|smallmatrix) ?\}.*) *[)\]]", re.DOTALL)
_REALS = re.compile(r"\\mathbb ?\{? ?R ?\}?|all real(?: number)?s|every real number", re.IGNORECASE)
_WITHOUT = re.compile(r"\\mathbb ?\{? ?R ?\}? ?(?:\\setminus|\\backslash|\\|-) ?\\\{(.*)\\\}")
_NOTHING = re.compile(r"\\emptyset|no (?:real )?solutions?|(?:the )?empty set", re.IGNORECASE)


def check_bounds(text: str) -> None:
    """Refuse brackets nested too deep, and numbers and texts that are too long.

    Raises:
        TooLargeError: `text` is beyond the bounds.
    """
    if len(text) > _MAX_CHARS:
        raise TooLargeError(f"more than {_MAX_CHARS} characters in one spelling")
    if len(text) <= MAX_DIGITS and text.count("(") + text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = digits = 0
    for char in text:
        if char.isdigit():
            digits += 1
            if digits > MAX_DIGITS:
                raise TooLargeError(f"a number of more than {MAX_DIGITS} digits")
            continue
        digits = 0
        if char in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise TooLargeError(f"nested deeper than {MAX_DEPTH}")
        elif char in ")]}":
            depth -= 1


def read(text: str, level: int = 0) -> Node:
    """Return the tree of the normalised `text`.

    Raises:
        TooLargeError: it is beyond the bounds.
    """
    while len(text) > 1 and text[0] == "{" and closes(text) == len(text) - 1:
        text = text[1:-1].strip()
    if " is " in text:
        text = _SENTENCE.sub(_equality_of, text, count=1)
    squeezed = squeeze(text)
    if text.endswith("}") and (number := read_common(text)) is not None:
        return Scalar(text=squeezed, number=number, unit=None)
    if level > _MAX_LEVELS or not text:
        return Opaque(text=squeezed)
    if _NOTHING.fullmatch(text):
        return Set(text="\\{\\}", items=())
    if _REALS.fullmatch(text):
        line = Interval(low=None, has_low=False, high=None, has_high=False)
        return Intervals(text="(-\\infty,\\infty)", variable="", parts=(line,))
    if (without := _WITHOUT.fullmatch(text)) is not None:
        return read_complement(without[1], squeezed) or Opaque(text=squeezed)
    if _STRUCTURAL.search(text):
        found = _structured(text, squeezed, level)
        if found is not None:
            return found
    return _simple(text, squeezed, level)


def _equality_of(sentence: re.Match[str]) -> str:
    return f"{sentence[1]} = {sentence[2]}" if is_name(sentence[1]) else sentence[0]


def _simple(text: str, squeezed: str, level: int) -> Node:
    choice = read_choice(text)
    if choice is not None:
        return Choice(text=squeezed, letter=choice)
    name = read_short_name(text)
    if name is not None:
        return Words(text=squeezed, words=name)
    body, unit = split_unit(text)
    number = read_number(body)
    if number is None and unit is not None:
        whole = read_number(text)
        if whole is not None:
            return Scalar(text=squeezed, number=whole, unit=None)
    if number is not None:
        return Scalar(text=squeezed, number=number, unit=unit)
    lettered = read_lettered(text)
    if lettered is not None:
        return Choice(text=squeezed, letter=lettered[0], rest=read(lettered[1], level + 1))
    words = read_words(text)
    return Opaque(text=squeezed) if words is None else Words(text=squeezed, words=words)


def _structured(text: str, squeezed: str, level: int) -> Node | None:
    inner = _BRACKETED_MATRIX.fullmatch(text)
    matrix = _MATRIX.fullmatch(text if inner is None else inner[1].strip())
    if matrix is not None:
        return _matrix(matrix[2], squeezed, level)
    point = _POINT.fullmatch(text)
    if point is not None:
        body = _bracketed(point[2], squeeze(point[2]), level + 1)
        return None if body is None else Named(text=squeezed, name=point[1], body=body)
    time = read_clock(text)
    if time is not None:
        return Words(text=squeezed, words=time)
    if text[0] in "([\\" and (bracketed := _bracketed(text, squeezed, level)) is not None:
        return bracketed
    parts = split(text, _SEPARATOR)
    if len(parts) > 1:
        return _listed(text, parts, squeezed, level)
    cups = split(text, _CUP)
    if len(cups) > 1:
        return _union([read(part, level + 1) for part, _ in cups], squeezed)
    if len(relation := split(text, _RELATION)) == 2 and all(part for part, _ in relation):
        (left, _), (right, sign) = relation
        return Relation(text=squeezed, sign=sign, left=_unmarked(left), right=_unmarked(right))
    if len(membership := split(text, _IN)) == 2 and is_name(membership[0][0]):
        return Named(text=squeezed, name=canonical_name(membership[0][0]), body=read(membership[1][0], level + 1))
    inequality = split(text, _INEQUALITY)
    if len(inequality) > 1:
        found = read_inequality(inequality, squeezed) if len(split(text, _EQUALITY)) == 1 else None
        return found or Opaque(text=squeezed)
    equality = split(text, _EQUALITY)
    if len(equality) > 1:
        return _equality(equality, squeezed, level)
    if _SIGN.search(text):
        return _both_signs(text, squeezed, level)
    ratio = split(text, _COLON)
    if len(ratio) == 2 and ratio[1][1] == ":" and is_quantity(ratio[0][0]):  # length: 5
        return Named(text=squeezed, name=canonical_name(ratio[0][0]), body=read(ratio[1][0], level + 1))
    if 1 < len(ratio) <= 4:
        return _ratio(ratio, squeezed)
    return None


def _bracketed(text: str, squeezed: str, level: int) -> Node | None:
    """Read the contents of one pair of brackets that encloses the whole text."""
    if text.startswith("\\{"):
        if closes(text, 1) != len(text) - 1 or text[-2] != "\\":
            return None
        inner = text[2:-2].strip()
        built = read_set_builder(inner, squeezed)
        if built is not None:
            return built
        items = [read(part, level + 1) for part, _ in split(inner, _COMMA) if part]
        return Set(text=squeezed, items=_flat(items))
    if text[0] == "\\" or closes(text) != len(text) - 1:
        return None
    interval = read_bracketed_interval(text, squeezed)
    if interval is not None:
        return interval
    inner = text[1:-1].strip()
    parts = split(inner, _COMMA)
    if len(parts) > 1 and all(part for part, _ in parts):
        entries = tuple(read(part, level + 1) for part, _ in parts)
        return Tuple(text=squeezed, items=entries, opening=text[0], closing=text[-1])
    if text[0] == "(" and not read_choice(text) and _STRUCTURAL.search(inner):
        return read(inner, level + 1)
    return None


def _listed(text: str, parts: list[tuple[str, str]], squeezed: str, level: int) -> Node | None:
    """Read a list without brackets, or a sentence with commas; None if it is neither."""
    texts = [part for part, _ in parts]
    joints = {joint for _, joint in parts[1:]} - {",", ";"}
    if "" in texts:  # ", and" has no text between its two separators
        texts = [part for part in texts if part]
        if len(texts) < 2:
            return read(texts[0], level + 1) if texts else None
    if len(texts) > MAX_PARTS:
        raise TooLargeError(f"more than {MAX_PARTS} parts")
    nodes = [read(part, level + 1) for part in texts]
    if all(isinstance(node, Intervals) for node in nodes):
        if joints == {"or"}:
            return _union(nodes, squeezed)
        if joints == {"and"}:
            return intersect([node for node in nodes if isinstance(node, Intervals)], squeezed)
        return Set(text=squeezed, items=tuple(nodes))
    if any(isinstance(node, Words) for node in nodes) and is_plain(text) and "or" not in joints:
        return (
            _simple(text, squeezed, level)
            if not all(isinstance(node, Words) for node in nodes)
            else Set(text=squeezed, items=tuple(nodes))
        )
    name = ""
    items: list[Node] = []
    for node in nodes:  # x = 5, 7 names both
        if isinstance(node, Named):
            name = node.name
        elif name and isinstance(node, Scalar) and len({n.name for n in nodes if isinstance(n, Named)}) == 1:
            node = Named(text=f"{name}={node.text}", name=name, body=node)
        items.append(node)
    return Set(text=squeezed, items=_flat(items))


def _unmarked(side: str) -> str:
    """Return a side of a relation, without the marks of lines and segments."""
    return re.sub(r"[{}]", "", squeeze(_LINE.sub("", side))).strip()


def _union(nodes: list[Node], squeezed: str) -> Node:
    intervals: list[Intervals] = []
    for node in nodes:
        if isinstance(node, Tuple) and node.opening in "([":
            found = read_bracketed_interval(node.text, node.text, force=True)
            if found is None:
                return Opaque(text=squeezed)
            intervals.append(found)
        elif isinstance(node, Intervals):
            intervals.append(node)
        elif isinstance(node, Named) and isinstance(node.body, Intervals):
            intervals.append(node.body)
        elif all(isinstance(each, Set) for each in nodes):
            return Set(
                text=squeezed, items=tuple(item for each in nodes if isinstance(each, Set) for item in each.items)
            )
        else:
            return Opaque(text=squeezed)
    return unite(intervals, squeezed)


def _equality(parts: list[tuple[str, str]], squeezed: str, level: int) -> Node:
    texts = [part for part, _ in parts]
    if not all(texts):
        return Opaque(text=squeezed)
    approximate = tuple(sign == "\\approx" for _, sign in parts[1:])
    named = is_name(texts[0]) and not read_number_safely(texts[0])
    if not named and len(texts) == 2 and re.fullmatch(SYMBOL, texts[1]) and not is_name(texts[0]):
        left = read_number(texts[0])
        if left is not None and not has_variables(left.value):  # 5 = x
            return Named(text=squeezed, name=canonical_name(texts[1]), body=read(texts[0], level + 1))
    if not named:
        if len(texts) == 2 and not approximate[0]:
            left, right = read_number(texts[0]), read_number(texts[1])
            is_solved = is_comparison(texts[0]) and read_number_safely(texts[1])
            value = read(texts[1], level + 1) if is_solved else None
            if left is None or right is None:
                return Equation(text=squeezed, difference=None, value=value)
            try:
                difference = add(left.value, negate(right.value))
            except NoValueError:
                return Equation(text=squeezed, difference=None)
            if has_variables(difference):
                return Equation(text=squeezed, difference=difference, value=value)
        nodes = tuple(read(part, level + 1) for part in texts)
        return Chain(text=squeezed, parts=nodes, is_approximate=approximate)
    nodes = tuple(read(part, level + 1) for part in texts[1:])
    first = num_formulas(nodes)
    body = nodes[first]
    if len(nodes) > first + 1:
        approximate = approximate[first + 1 :]
        body = Chain(text=squeezed, parts=nodes[first:], is_approximate=approximate, is_named=True)
    return Named(text=squeezed, name=canonical_name(texts[0]), body=body)


def read_number_safely(text: str) -> Number | None:
    """Return the number in `text` if it has no variables, else None."""
    number = read_number(text)
    return None if number is None or has_variables(number.value) else number


def _both_signs(text: str, squeezed: str, level: int) -> Node:
    """Read plus or minus as both values."""
    upper = _SIGN.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
    lower = _SIGN.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
    return Set(text=squeezed, items=_flat([read(upper, level + 1), read(lower, level + 1)]))


def _ratio(parts: list[tuple[str, str]], squeezed: str) -> Node | None:
    terms = [read_number(part) for part, _ in parts]
    values = tuple(term.value for term in terms if term is not None)
    return Ratio(text=squeezed, terms=values) if len(values) == len(parts) else None


def _matrix(inner: str, squeezed: str, level: int) -> Node:
    rows = [row for row in re.split(r"\\\\|\\cr\b", inner) if row.strip()]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows]
    if sum(map(len, cells)) > MAX_PARTS:
        raise TooLargeError(f"a matrix of more than {MAX_PARTS} entries")
    return Matrix(text=squeezed, rows=tuple(tuple(read(cell, level + 1) for cell in row) for row in cells))


def _flat(nodes: list[Node]) -> tuple[Node, ...]:
    """Return `nodes` with unnamed sets replaced by their items."""
    items: list[Node] = []
    for node in nodes:
        if isinstance(node, Set) and not node.text.startswith("\\{"):
            items.extend(node.items)
        elif isinstance(node, Named) and isinstance(node.body, Set):
            items.extend(Named(text=item.text, name=node.name, body=item) for item in node.body.items)
        else:
            items.append(node)
    if len(items) > MAX_PARTS:
        raise TooLargeError(f"more than {MAX_PARTS} parts")
    return tuple(items)
