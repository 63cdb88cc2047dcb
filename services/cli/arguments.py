"""Arguments of several commands: recipes and overrides in any order, paths, the run to resume, completion."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock import config as configuration
from penstock import shipped
from penstock.config import reference
from penstock.config.paths import expand_home
from penstock.errors import ConfigError
from services.launch.run_folder import RunFolder
from services.recipe import Recipe

TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that takes `--section.key=value`."""

RECIPE_HELP = "Recipe: a TOML file, or the name of one that comes with Penstock; further ones override it."
"""Help of the argument that `load_recipes` reads."""

_OVERRIDE = re.compile(r"--[a-z_]+\.")

RecipeArgument = Annotated[Path | None, typer.Argument(metavar="RECIPE...", help=RECIPE_HELP, show_default=False)]
"""The first recipe; `sort_arguments` finds the others."""
ResumeOption = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN_FOLDER", help="Continue the run in this folder.")
]
"""The run that `load_run` continues."""


class RecipeCommand(TyperCommand):
    """A command that takes overrides; shells complete their keys."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the command's own options and arguments, and after `--` the settings of a recipe."""
        found = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("--"):
            item = type(super().shell_complete(ctx, "--help")[0])  # typer does not export the class of its items
            found += [item(key, help=text) for key, text in _overrides() if key.startswith(incomplete)]
        return found


class RecipeGroup(TyperGroup):
    """A group of commands that take overrides; `overrides_of` returns them. The group itself may be such a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the overrides out: of a group, what follows its options would be the name of a command."""
        overrides = [each for each in args if _OVERRIDE.match(each)]
        ctx.meta[__name__] = overrides
        return super().parse_args(ctx, [each for each in args if each not in overrides])


def overrides_of(context: typer.Context) -> list[str]:
    """Return the overrides of a command of a `RecipeGroup`."""
    found: list[str] = context.meta[__name__]
    return found


def _overrides() -> Iterator[tuple[str, str]]:
    for section in reference.sections(Recipe):
        for setting in section.settings:
            yield f"--{section.key}.{setting.name}=", setting.help


def expand_paths(command: Any) -> None:
    """Have a home folder in place of the `~` of each path that is given to `command`, or to a command of this group.

    A shell expands `~` neither in `--output=~/scores.jsonl` nor in quotes. Settings expand it by themselves.
    """
    for parameter in command.params:
        if parameter.callback is None:
            parameter.callback = lambda context, parameter, value: _expanded(value)
    for each in getattr(command, "commands", {}).values():
        expand_paths(each)


def _expanded(value: Any) -> Any:
    """Return what was given for a parameter with paths expanded, one or several.

    Raises:
        ConfigError: this machine knows no such home folder.
    """
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    if not isinstance(value, Path):
        return value
    try:
        return Path(expand_home(str(value)))
    except ValueError as error:
        raise ConfigError(f"{value}: {error}") from None


def sort_arguments(first: Path | None, rest: Iterable[str]) -> tuple[list[Path], list[str]]:
    """Separate paths and overrides, in whatever order they were typed.

    Raises:
        ConfigError: an override is not `--section.key=value`. With a space in place of `=`, its value would be read as
            a path. Or this machine does not know the home folder with which a path begins.
    """
    arguments = [*([] if first is None else [str(first)]), *rest]
    overrides = [argument for argument in arguments if argument.startswith("-") and argument != "-"]
    for override in overrides:
        configuration.split_override(override)
    return [_expanded(Path(argument)) for argument in arguments if argument not in overrides], overrides


def load_recipes(recipes: list[Path], overrides: list[str]) -> Recipe:
    """Read at least one recipe: files, or names of recipes that come with Penstock.

    Raises:
        ConfigError: there is none, or one is wrong.
    """
    if not recipes:
        raise ConfigError(
            "give a recipe, for example tiny-cpu, which comes with Penstock, or mine.toml; further ones override it"
        )
    return configuration.load(Recipe, [shipped.find_recipe(recipe) for recipe in recipes], overrides)


def load_run(recipes: list[Path], overrides: list[str], *, resume: Path | None) -> tuple[Recipe, RunFolder | None]:
    """Read the recipe of a new run, or that of the run in the folder `resume`, and open this folder.

    Raises:
        ConfigError: there is neither recipe nor run, or both, or the recipe is wrong.
        SetupError: `resume` holds no run.
    """
    if resume is None:
        return load_recipes(recipes, overrides), None
    if recipes:
        raise ConfigError(f"--resume {resume} brings its own recipe; leave out {recipes[0]}")
    folder = RunFolder.open(resume)
    return configuration.load(Recipe, [folder.config_file], overrides), folder
