"""The Makefile's own work."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_make_clean_removes_every_ignored_folder_that_a_target_makes() -> None:
    """All folders of .gitignore but those of runs and of packages, which no target makes."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    folders = {line.strip("/") for line in ignored if re.fullmatch(r"/?[\w.-]+/", line)}
    recipe = (ROOT / "Makefile").read_text().partition("\nclean:")[2]
    [removed] = re.findall(r"^\trm -rf (.*)$", recipe, re.MULTILINE)
    assert set(removed.split()) == folders - {"runs", "dist", "__pycache__"}
