"""What the documents name exists: links, paths into the tree, and settings."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.reference import sections
from services.recipe import Recipe

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:penstock|services|proto|tests|bench|recipes|deploy|docs|models|tools|examples)/[\w./{}-]*)`")
_CODE = re.compile(r"`([^`]+)`")
_SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_<>]+)+)`")
_GIVEN = re.compile(r"--([a-z_]+\.[\w.]+)=")
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


_TABLES = sorted((_ROOT / "docs" / "coming-from").glob("*.md"))
"""Tables of other frameworks' switches: the second column has settings of ours."""

_SCRIPT_VARIABLES = ("MODEL_NAME", "DATASET_NAME", "NUM_GPUS", "EXTERNAL_RAY", "TRAIN_BACKEND")


def _rows(document: Path) -> Iterator[list[str]]:
    """The cells of each row of its tables."""
    for line in document.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("document", _TABLES, ids=lambda path: path.name)
def test_the_settings_of_a_switch_exist(document: Path) -> None:
    """In the tables, and in the commands that a page shows."""
    known = {f"{section.key}.{setting.name}" for section in sections(Recipe) for setting in section.settings}
    known |= {section.key.removesuffix(".<name>") for section in sections(Recipe) if section.key.endswith(".<name>")}
    rows = list(_rows(document))
    assert all(len(cells) == 3 for cells in rows), [cells for cells in rows if len(cells) != 3]
    named = {name for cells in rows for name in _CODE.findall(cells[1])} | {*_GIVEN.findall(document.read_text())}
    tops = {name.partition(".")[0] for name in known}
    for cells in rows:  # the third column explains, and may name settings too
        named |= {name for name in _SETTING.findall(cells[2]) if name.partition(".")[0] in tops}
    named = {name.replace("sets.test.", "sets.<name>.") for name in named} - {"section.key"}
    assert sorted(named - known) == []
    assert len(named) > 30


@pytest.mark.parametrize("document", _TABLES, ids=lambda path: path.name)
def test_every_switch_has_an_answer(document: Path) -> None:
    """A setting, or why there is none."""
    assert [cells[0] for cells in _rows(document) if not any(cells[1:])] == []


def test_every_variable_of_slime_s_script_has_a_row() -> None:
    """Whoever started its example with one finds it by name."""
    firsts = " ".join(cells[0] for cells in _rows(_ROOT / "docs" / "coming-from" / "slime.md"))
    assert [name for name in _SCRIPT_VARIABLES if f"`SLIME_SCRIPT_{name}`" not in firsts] == []
