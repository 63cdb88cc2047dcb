"""`penstock init`: copies a recipe that comes with Penstock to a file to edit."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import shipped
from penstock.errors import SetupError

_OVERLAY = "an overlay, no recipe of its own: give it behind a recipe, as its first lines show"
_MENTION = re.compile(r"recipes/([\w-]+)\.toml")


def init(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Recipe to copy; without it, all are listed.")
    ] = None,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Where to; in a folder, by default here, NAME.toml.", show_default=False),
    ] = Path(),
) -> int:
    """Copy a recipe that comes with Penstock to a file of your own, and the schema with which editors check it."""
    if name is None:
        for each, path in shipped.recipes().items():
            command = _command(path)
            use = f"penstock {command} {each}" if command else _OVERLAY
            sys.stdout.write(f"{each}\n    {_summary(path)}\n    {use}\n")
        return 0
    source = shipped.named_recipe(name)
    target = file / f"{name}.toml" if os.path.isdir(file) else file  # Path.is_dir may raise PermissionError
    schema = target.with_name(shipped.schema_file().name)
    _write_new(target, _as_copy(source.read_text(), name, target))
    if not schema.exists():
        try:
            _write_new(schema, shipped.schema_file().read_text())
        except SetupError:
            target.unlink()  # so that the same command can be given again
            raise
    command = _command(source)
    if command is None:
        sys.stdout.write(f"{target}: {_OVERLAY}\n")
    else:
        doctor, given = "doctor --sft" if command == "sft" else "doctor", shlex.quote(str(target))
        sys.stdout.write(f"{target}: edit it, then `penstock {doctor} {given}` and `penstock {command} {given}`\n")
    return 0


def _command(recipe: Path) -> str | None:
    """Return the command that the comments show with the recipe alone or first; None for an overlay, which has none."""
    found = re.search(
        rf"^#\s+penstock (train|sft)\s+recipes/{re.escape(recipe.name)}",
        recipe.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return found[1] if found else None


def _summary(recipe: Path) -> str:
    """Return the first paragraph of the file's opening comment, on one line."""
    lines = [
        line.removeprefix("#").strip()
        for line in recipe.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#:")
    ]
    return f"{' '.join(lines[: lines.index('')]).rstrip('.:')}."


def _as_copy(text: str, name: str, target: Path) -> str:
    """Return the recipe's text for `target`: its commands name the copy, and other recipes by name."""
    return _MENTION.sub(lambda mention: shlex.quote(str(target)) if mention[1] == name else mention[1], text)


def _write_new(file: Path, text: str) -> None:
    """Write a file that is not there yet; if it cannot be written whole, it is not there afterwards.

    Raises:
        SetupError: it exists, or cannot be written.
    """
    try:
        written = file.open("x", encoding="utf-8")
    except FileExistsError:
        raise SetupError(f"{file} exists already; give another name: `penstock init NAME FILE`") from None
    except OSError as error:
        raise _unwritable(file, error) from None
    try:
        with written:
            written.write(text)
    except OSError as error:
        file.unlink()
        raise _unwritable(file, error) from None


def _unwritable(file: Path, error: OSError) -> SetupError:
    return SetupError(f"{file} cannot be written: {error.strerror}; give another: `penstock init NAME FILE`")
