"""`penstock config`: prints a recipe's settings as the processes would read it, or the meaning of each setting."""

import difflib
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import config as configuration
from penstock.config import reference
from penstock.errors import ConfigError
from services.cli.arguments import RECIPE_HELP, load_recipes, sort_arguments
from services.recipe import Recipe


def show_config(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECIPE...",
            help=f"{RECIPE_HELP} After --help-settings: sections.",
        ),
    ] = None,
    help_settings: Annotated[
        bool, typer.Option("--help-settings", help="Print type, default and meaning of every setting, or of a section.")
    ] = False,
) -> int:
    """Print the recipe as the processes would read it: overrides applied, defaults filled in."""
    arguments, overrides = sort_arguments(recipe, context.args)
    if help_settings:
        if overrides:
            raise ConfigError(
                f"--help-settings takes sections, for example trainer.optimizer; leave out {overrides[0]}"
            )
        _print(_explain([str(argument) for argument in arguments]))
    else:
        _print(configuration.dump(load_recipes(arguments, overrides)))
    return 0


def _print(text: str) -> None:
    """Write to standard output as UTF-8 in every locale, because recipes are read as UTF-8.

    Names of files that were not decoded come out as the bytes that they were given as.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.stdout.write(text)


def _explain(wanted: list[str]) -> str:
    """Return the settings of the sections `wanted` and of those inside them; without any, of all."""
    known = list(reference.sections(Recipe))
    keys = {".".join(section.key.split(".")[: depth + 1]) for section in known for depth in range(4)}
    for key in wanted:
        if key not in keys:
            similar = difflib.get_close_matches(key, sorted(keys), n=1)
            top = sorted({section.key.partition(".")[0] for section in known})
            hint = f"did you mean {similar[0]}?" if similar else f"known: {', '.join(top)}"
            raise ConfigError(f"unknown section {key}; {hint}")
    prefixes = tuple(f"{key}." for key in wanted) or ("",)
    return reference.as_text([section for section in known if f"{section.key}.".startswith(prefixes)])
