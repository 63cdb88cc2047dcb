"""`penstock train`: runs a whole training run on this machine, or on a Ray cluster."""

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Annotated, Final

import typer

from penstock.runtime import process
from penstock.runtime.disk_space import disk_full_reported
from penstock.runtime.imports import import_with_extra
from penstock.runtime.security import Security, hide_secrets
from penstock.telemetry import log
from services.cli import browser
from services.cli.arguments import RecipeArgument, ResumeOption, load_run, sort_arguments
from services.cli.own_folder import own_folder
from services.cli.runs import view_command
from services.launch.run_folder import TRAIN, RunFolder
from services.launch.settings import hub_models, run_inputs
from services.recipe import Recipe

_VIEW: Final = "penstock train --view"


def train(
    context: typer.Context,
    recipe: RecipeArgument = None,
    resume: ResumeOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print processes, addresses, GPUs and files, and start nothing.")
    ] = False,
    view: Annotated[
        bool,
        typer.Option(
            "--view",
            help="Show the run in a browser while it goes on, and open that if this is a terminal with a display.",
        ),
    ] = False,
) -> int:
    """Start every process of a run and train to the end. Any --section.key=value overrides the recipe."""
    from services.launch import launcher

    recipes, overrides = sort_arguments(recipe, context.args)
    settings, folder = load_run(recipes, overrides, resume=resume)
    if view and not dry_run:
        view_command.require_packages(command=_VIEW)
    if settings.launch.backend == "ray":
        on_ray = import_with_extra("services.cli.train.on_ray", "penstock train --launch.backend=ray", extra="ray")
        return int(on_ray.train(settings, folder, dry_run=dry_run, view=view))
    run_inputs.require_inputs_without_model(settings)
    security = Security.load(settings.security)
    plan = launcher.plan_run(settings)  # before a download, on which it does not depend
    unfetched: list[str] = []
    if dry_run:
        settings, unfetched = hub_models.with_cached_models(settings)
    else:
        settings = hub_models.with_models(settings)
    if not unfetched:
        run_inputs.require_inputs(settings)
    if dry_run:
        path = RunFolder.pattern(settings.run) if folder is None else str(folder.path)
        learned = [] if settings.demonstrations is None else [settings.demonstrations.describe()]
        sys.stdout.write("\n".join([*plan.describe(), *learned, *unfetched, *RunFolder.describe(path), ""]))
        return 0
    settings = run_inputs.pin_inputs(settings, with_sets=settings.evaluation.is_in_training, with_demonstrations=True)
    rows = import_with_extra("services.launch.checks.row_check", "penstock train", extra="trainer")
    rows.check_rows(settings, with_sets=settings.evaluation.is_in_training, say=typer.echo)
    is_new = folder is None
    folder = folder or RunFolder.create(settings.run)
    run = functools.partial(launcher.launch, settings, folder, security=security)
    return run_in_folder(settings, folder, run, is_new=is_new, view=view)


def run_in_folder(
    settings: Recipe, folder: RunFolder, launch: Callable[[asyncio.Event], Awaitable[bool]], *, is_new: bool, view: bool
) -> int:
    """Launch a run in its folder, which no other launcher may use meanwhile, and return the exit code.

    That is 130 after a signal, unless the run was complete by then.

    Args:
        settings: The recipe.
        folder: The run's folder.
        launch: Keeps the recipe in the folder, runs the processes until its event is set, or the run ends, and returns
            whether the run is complete.
        is_new: Whether the folder goes if no process was started.
        view: Whether the run is shown in a browser.

    Raises:
        SetupError: the disk of the folder is full, or another launcher uses it.
    """
    showing = view_command.prepare([folder.path], command=_VIEW) if view else None
    hide_secrets()
    with own_folder(folder, settings, command=TRAIN, service="launcher", is_new=is_new):
        interrupted = False

        async def run(stop: asyncio.Event) -> None:
            nonlocal interrupted
            async with AsyncExitStack() as stack:
                if showing is not None:
                    shown = await stack.enter_async_context(showing)
                    sys.stdout.write(f"view    {shown.address}\n")
                    if browser.has_person():
                        await asyncio.to_thread(browser.open_page, shown.address_once)
                is_complete = await launch(stop)
            interrupted = stop.is_set() and not is_complete

        with disk_full_reported(folder.path, f"make room and continue with `penstock train --resume {folder.path}`"):
            code = process.run(run)
    if is_new and code == process.EXIT_USER_ERROR:
        log.close_file()
        folder.discard_unused()  # no process was started: a port was taken, or the bus does not answer
    return process.EXIT_INTERRUPTED if interrupted else code
