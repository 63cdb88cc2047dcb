"""tests/VARIANTS.md says of every variant what protects its subject otherwise."""

import re
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_TABLES = (_TESTS / "VARIANTS.md").read_text()


def test_every_file_with_variants_has_a_row() -> None:
    """And every row is of a file that has some."""
    marked = {
        str(file.relative_to(_TESTS))
        for file in _TESTS.rglob("test_*.py")
        if re.search(r"\bmark\.variant\b", file.read_text()) and file != Path(__file__)
    }
    assert set(re.findall(r"^\| `([\w/]+\.py)", _TABLES, re.MULTILINE)) == marked


def test_every_test_that_is_named_exists() -> None:
    """Both the variants and those that protect their subjects."""
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)", _TABLES))
    missing = [(file, name) for file, name in named if f"def {name}(" not in (_TESTS / file).read_text()]
    assert missing == []
