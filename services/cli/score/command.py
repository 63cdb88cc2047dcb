"""The command `penstock score`; `run` does the work."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from penstock import config as configuration
from penstock import shipped
from penstock.config import LogConfig
from penstock.errors import ConfigError
from penstock.runtime.imports import import_with_extra
from penstock.runtime.security import Security, hide_secrets
from penstock.telemetry import log
from services.cli.arguments import sort_arguments
from services.recipe import Recipe


def score(
    context: typer.Context,
    source: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Lines to judge; - or none: standard input.")
    ] = None,
    profile: Annotated[str, typer.Option("--profile", help="Profile of lines without one.")] = "math",
    output: Annotated[Path | None, typer.Option("--output", help="File to write; default: standard output.")] = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="A running service; default: a private one.")
    ] = "",
    config: Annotated[
        list[Path] | None, typer.Option("--config", help="Recipe (TOML) of the private service; default: none.")
    ] = None,
) -> int:
    """Judge lines {"id", "gold", "response"} of a file, and write {"id", "score", "status", ...} in the same order.

    "gold" is a string or a list of them. Optional: "golds", "prompt", "profile", "deadline_s". A bad line gets the
    status INVALID and the exit code 1. Any --reward.key=value overrides the recipe of the private service.
    """
    from services.cli.score import run as scoring

    sources, overrides = sort_arguments(source, context.args)
    if len(sources) > 1:
        raise ConfigError(f"give one file, or none for standard input; given: {', '.join(map(str, sources))}")
    source = None if sources in ([], [Path("-")]) else sources[0]
    if address:
        if config or not all(override.startswith("--security.") for override in overrides):
            raise ConfigError(
                f"--address {address} names a service with settings of its own; leave out these here, all but "
                "--security.key=value"
            )
        security = Security.load(configuration.load(Recipe, (), overrides).security)
        log.configure(LogConfig(level="warning"), service="score")
        service = functools.partial(scoring.running_at, address, security)
    else:
        recipe = configuration.load(
            Recipe, [shipped.find_recipe(path) for path in config or ()], ["--log.level=warning", *overrides]
        )
        log.configure(recipe.log, service="score")
        hide_secrets()
        security = Security.load(recipe.security)
        import_with_extra("services.reward.server", "penstock score", extra="reward")
        service = functools.partial(scoring.private_service, recipe.reward, security)
    return scoring.score(source=source, output=output, profile=profile, service=service)
