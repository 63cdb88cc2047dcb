"""The command `penstock env`; `by_hand` and `lines` do the work."""

import asyncio
import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import config as configuration
from penstock import shipped
from penstock.errors import ConfigError
from penstock.runtime.security import Security, hide_secrets
from penstock.telemetry import log
from services.cli.arguments import sort_arguments
from services.recipe import Recipe

_LINES_SUFFIX = ".jsonl"
_SLIME_PROFILE = "slime_math"


def env(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The environment, as prompts call it.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE...] [-|FILE.jsonl]",
            help="Recipes with data and environments of your own; lines to play: - is standard input.",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the environments.")] = False,
    row: Annotated[
        int | None, typer.Option("--row", metavar="N", help="Play this row of the recipe's data, from 0.", min=0)
    ] = None,
    data_source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="The row's source, where the data has several.")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", help="Play this question.")] = None,
    gold: Annotated[list[str] | None, typer.Option("--gold", help="Its correct answer; several: one suffices.")] = None,
    image: Annotated[list[Path] | None, typer.Option("--image", metavar="FILE", help="Its pictures, in order.")] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="The reward service's profile; default: the row's, or math.")
    ] = None,
    max_turns: Annotated[int | None, typer.Option("--max-turns", help="The task's limit of turns.", min=1)] = None,
    compat: Annotated[
        str | None, typer.Option("--compat", help="Behave as another framework's: slime, of geo3k_tools.")
    ] = None,
    pictures: Annotated[
        Path | None, typer.Option("--pictures", metavar="FOLDER", help="Save the pictures that are shown.")
    ] = None,
    address: Annotated[
        str, typer.Option("--address", metavar="HOST:PORT", help="A running reward service; default: a private one.")
    ] = "",
) -> int:
    """Play an environment by hand: you type the policy's turns and see its answers. Needs neither a model nor a bus.

    With - or a FILE.jsonl it plays lines {"id", "gold", "max_turns", "responses"} instead, and writes for each one
    {"id", "steps": [{"kind", "done", "score"}]}. Any --section.key=value overrides the recipe.
    """
    given = [str(argument) for argument in (name, source) if argument is not None]
    paths, overrides = sort_arguments(None, [*given, *context.args])
    name = str(paths.pop(0)) if paths and not list_ else None
    scripts = [path for path in paths if str(path) == "-" or path.suffix == _LINES_SUFFIX]
    recipe = configuration.load(
        Recipe,
        [shipped.find_recipe(path) for path in paths if path not in scripts],
        ["--log.level=warning", *overrides],
    )
    log.configure(recipe.log, service="env")
    hide_secrets()
    from services.cli.environment import by_hand, grading, lines, tasks
    from services.rollout.worker.environments.registry import EnvironmentRegistry

    security = Security.load(recipe.security)
    registry = EnvironmentRegistry(recipe.worker.environments, security=security)
    if list_:
        sys.stdout.write("".join(f"{line}\n" for line in tasks.describe(registry)))
        return 0
    if name is None:
        raise ConfigError(f"give an environment: {', '.join(registry.names)}")
    factory = tasks.find_factory(registry, name, compat=compat)
    default_profile = _SLIME_PROFILE if compat == "slime" else "math"
    service = functools.partial(grading.open_service, address, recipe.reward, security)
    with grading.Grading(service) as graders, asyncio.Runner() as runner, tasks.started(registry, runner):
        if scripts:
            _refuse_task(row=row, question=question, gold=gold, image=image, pictures=pictures)
            if len(scripts) > 1:
                raise ConfigError(f"give one file of lines; given: {', '.join(map(str, scripts))}")
            return lines.play(
                None if str(scripts[0]) == "-" else scripts[0],
                factory,
                graders,
                runner,
                profile=profile or default_profile,
                max_turns=max_turns,
                timeout_s=recipe.worker.episode_timeout_s,
            )
        subject: tasks.Subject
        if row is not None:
            _refuse_task(question=question, gold=gold, image=image)
            subject = tasks.row_of(recipe, row, source=data_source)
        elif question is not None:
            subject = tasks.question(question, golds=gold or [], images=image or [], profile=default_profile)
        else:
            raise ConfigError(
                "give a task: --row N with a recipe, or --question TEXT --gold ANSWER; or - for lines on standard input"
            )
        task = subject.to_task(graders, profile=profile, max_turns=max_turns)
        return by_hand.play(task, factory, runner, pictures=pictures)


def _refuse_task(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name} does not go with what else is given; leave it out")
