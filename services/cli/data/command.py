"""The command `penstock data`; `run` does the work."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.config import LogConfig
from penstock.errors import ConfigError
from penstock.runtime.imports import import_with_extra
from penstock.telemetry import log
from services.cli.arguments import RecipeArgument, load_recipes, sort_arguments

_NUM_EXAMPLES = 12
"""On the page, of each source, unless `--examples` says how many."""


def data(
    context: typer.Context,
    recipe: RecipeArgument = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="Read this many rows of each source and set; default: all.", min=1)
    ] = None,
    sheet: Annotated[
        Path | None,
        typer.Option("--sheet", metavar="FILE", help="Write a page of examples with their pictures (HTML)."),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option("--examples", help=f"Examples of each source on the page; default: {_NUM_EXAMPLES}.", min=1),
    ] = None,
    sft: Annotated[bool, typer.Option("--sft", help="Read rows as `penstock sft` does: whole conversations.")] = False,
) -> int:
    """Read the data of a recipe as training would: rows, columns, images, prompt lengths, dropped rows and why.

    Demonstrations and evaluation sets are read too. The lengths are cached, so that training need not measure them
    again. Exits with 1 if training would refuse a row, or all of a source as too long or wrong.
    """
    if examples is not None and sheet is None:
        raise ConfigError(f"--examples {examples} is for the page of examples; give --sheet FILE as well")
    recipes, overrides = sort_arguments(recipe, context.args)
    settings = load_recipes(recipes, overrides)
    log.configure(LogConfig(level="warning"), service="data")
    looking = import_with_extra("services.cli.data.run", "penstock data", extra="trainer")
    num_examples = examples or _NUM_EXAMPLES
    code: int = looking.look(settings, max_rows=rows, sheet=sheet, num_examples=num_examples, is_sft=sft)
    return code
