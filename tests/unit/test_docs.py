"""What the documents name exists: links, and paths into the tree."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:penstock|services|proto|tests|bench|recipes|deploy|docs|models|tools|examples)/[\w./{}-]*)`")
_DOCUMENTS = sorted(
    path.relative_to(_ROOT).as_posix()
    for path in (_ROOT / "README.md", _ROOT / "CHANGELOG.md", *(_ROOT / "docs").rglob("*.md"))
)

_NOT_IN_THE_TREE = {"deploy/.env"}
"""Files that users write."""


def _named(document: Path) -> Iterator[tuple[str, Path]]:
    text = document.read_text()
    for target in _LINK.findall(text):
        if "://" not in target:
            yield target, document.parent / target
    for target in _PATH.findall(text):
        if "{" not in target and target not in _NOT_IN_THE_TREE:
            yield target, _ROOT / target


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_what_a_document_names_exists(document: str) -> None:
    """A file that was moved or deleted is not left behind in a text."""
    assert [name for name, path in _named(_ROOT / document) if not path.exists()] == []
