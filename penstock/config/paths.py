"""Types of settings that are paths.

A shell expands `~` only at the start of a word, so not in `--run.dir=~/runs`; in a recipe, nothing expands it. A shell
variable that is not set leaves an empty path, which Python takes for the working directory.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Final

import pydantic


def expand_home(path: str) -> str:
    """Return the path with the home folder in place of a `~`, or a `~name`, that it begins with.

    Raises:
        ValueError: this machine knows no such home folder.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"no home folder is known for {path.partition('/')[0]!r}; write out the path")
    return expanded


def _expand(given: Any) -> Any:
    if given == "":
        raise ValueError("is empty; give a path")
    return expand_home(given) if isinstance(given, str) else given


EXPANDED: Final = pydantic.BeforeValidator(_expand)
"""Expands `~`, and refuses an empty text."""
UNSET_IF_EMPTY: Final = pydantic.BeforeValidator(lambda given: None if given == "" else given)
"""Takes an empty text as unset."""

UserPath = Annotated[Path, EXPANDED]
"""A path, in which `~` is the home folder. It is not empty."""
OptionalPath = Annotated[UserPath | None, UNSET_IF_EMPTY]
"""A path as `UserPath`, or None, which an empty text also stands for."""
