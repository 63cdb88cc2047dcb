"""docs/operation/tracing.md lists the spans of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_CALLS = {"record", "recorded", "recorded_unless_short", "_record"}


def _documented() -> dict[str, set[str]]:
    """Return the attributes of each span in the table."""
    rows = re.findall(r"^\| `([a-z.]+)` \|[^|]*\|[^|]*\|([^|]*)\|$", _page(), re.MULTILINE)
    return {name: set(re.findall(r"`([a-z_]+)`", attributes)) for name, attributes in rows}


def _page() -> str:
    return (_ROOT / "docs" / "operation" / "tracing.md").read_text()


def _recorded() -> Iterator[tuple[str, set[str]]]:
    """Yield the name of each span that the code records, and the attributes that stand in the call."""
    for folder in ("penstock", "services"):
        for path in (_ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "record" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                    continue
                owner, first = node.func.value, node.args[0]
                is_span = isinstance(owner, ast.Name) and owner.id == "spans" and node.func.attr in _CALLS
                is_span = is_span or node.func.attr == "_record"
                if is_span and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value, {keyword.arg for keyword in node.keywords if keyword.arg}


def test_the_page_lists_every_span_and_no_other() -> None:
    """Who reads a trace finds each name in the page."""
    assert {name for name, _ in _recorded()} == set(_documented())


def test_the_page_lists_the_attributes() -> None:
    """What the code gives a span is in its row; `error` is explained once."""
    documented = _documented()
    missing = {name: found for name, given in _recorded() if (found := given - documented[name] - {"error"})}
    assert not missing
