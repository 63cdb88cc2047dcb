"""Who may import whom: `penstock` knows no service, as docs/architecture.md draws it."""

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_penstock_imports_nothing_of_the_services() -> None:
    """The library that services share stands without any of them."""
    guilty = {
        str(file.relative_to(_ROOT)): module
        for file in (_ROOT / "penstock").rglob("*.py")
        for module in _imports(file)
        if module.partition(".")[0] == "services"
    }
    assert guilty == {}
