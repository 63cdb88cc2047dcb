"""The command `penstock sft`; `run` has the work."""

from pathlib import Path
from typing import Annotated

import typer

from penstock import config as configuration
from penstock.errors import ConfigError
from services.cli import service_settings
from services.cli.arguments import RECIPE_HELP, load_recipes, sort_arguments
from services.cli.extras import import_with_extra
from services.launch.run_folder import RunFolder
from services.recipe import Recipe


def sft(
    context: typer.Context,
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE...", help=RECIPE_HELP, show_default=False),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN_FOLDER", help="Continue the run in this folder.")
    ] = None,
) -> int:
    """Train the recipe's model on what assistants say in its data, in this one process.

    Takes [sft], [data], [model], [trainer] and [trackers]; starts neither engines nor NATS. Any --section.key=value
    overrides the recipe. `penstock train recipe.toml --model.path=CHECKPOINT/model` goes on from a checkpoint.
    """
    recipes, overrides = sort_arguments(recipe, context.args)
    if resume is not None and recipes:
        raise ConfigError(f"--resume {resume} brings its own recipe; leave out {recipes[0]}")
    folder = None if resume is None else RunFolder.open(resume)
    settings = (
        load_recipes(recipes, overrides)
        if folder is None
        else configuration.load(Recipe, [folder.config_file], overrides)
    )
    service_settings.for_sft(settings)
    training = import_with_extra("services.cli.sft.run", "penstock sft", extra="trainer")
    code: int = training.train(settings, folder)
    return code
