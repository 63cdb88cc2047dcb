"""The Makefile's own work."""

import re
from pathlib import Path

from tests.support.wheel import BUILD

ROOT = Path(__file__).resolve().parents[2]


def test_make_clean_removes_every_ignored_folder_that_a_target_makes() -> None:
    """All folders of .gitignore but those of runs."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    folders = {line.strip("/") for line in ignored if re.fullmatch(r"/?[\w.-]+/", line)}
    recipe = (ROOT / "Makefile").read_text().partition("\nclean:")[2]
    [removed] = re.findall(r"^\trm -rf (.*)$", recipe, re.MULTILINE)
    assert set(removed.split()) == folders - {"runs", "__pycache__"}


def test_make_wheel_builds_what_the_tests_of_the_wheel_install() -> None:
    """By the same command."""
    [command] = re.findall(r"^wheel: setup ## .*\n\t(.*)\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command == f"$(BIN)/python {' '.join(BUILD)} dist"
