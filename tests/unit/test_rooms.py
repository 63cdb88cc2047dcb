"""Rooms are small: what a reader looks for stands among few files."""

from collections import Counter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("room", "most"), [("penstock", 16), ("services", 16), ("bench", 16), ("tests", 18)])
def test_no_folder_has_many_files_side_by_side(room: str, most: int) -> None:
    """A folder with more asks for a room of its own."""
    files = (file for file in (_ROOT / room).rglob("*.py") if file.name != "__init__.py")
    numbers = Counter(file.parent.relative_to(_ROOT) for file in files)
    assert {str(folder): number for folder, number in numbers.items() if number > most} == {}
