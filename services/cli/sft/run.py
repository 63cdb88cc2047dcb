"""Runs `penstock sft`: trains in this process, and shows the falling loss."""

import asyncio
import sys
from pathlib import Path
from typing import Any

from penstock.runtime import process
from penstock.runtime.security import hide_secrets
from penstock.telemetry import log
from services.cli.own_folder import own_folder
from services.launch.metrics import describe_validation
from services.launch.run_folder import RunFolder
from services.launch.settings import run_inputs, service_settings
from services.launch.terminal.display import Display, open_display
from services.launch.terminal.lasting_output import lasting_output
from services.launch.terminal.pace import Pace
from services.recipe import Recipe
from services.trainer.sft.loop import Observer
from services.trainer.sft.main import train as train_supervised
from services.view.summary import status_of


class _Shown(Observer):
    """Shows a run on the terminal; its folder keeps the recipe once model and rows have not refused it."""

    def __init__(self, display: Display, folder: RunFolder, recipe: Recipe, pace: Pace) -> None:
        self._display = display
        self._folder = folder
        self._recipe = recipe
        self._pace = pace
        self._rows: list[dict[str, Any]] = []
        self._num_shown = 0
        self.is_complete = False
        """Whether the run has ended with nothing left to do."""

    def opened(self, *, num_rows: int, num_too_long: int, step: int, num_steps: int) -> None:
        self._folder.write_config(self._recipe)
        too_long = f", {num_too_long} of them too long" if num_too_long else ""
        continues = f", from step {step}" if step else ""
        self._display.write(f"{num_rows} rows{too_long}; {num_steps} steps{continues}")

    def trained(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._pace.when_due(self.catch_up)

    def validated(self, row: dict[str, Any]) -> None:
        self.catch_up()
        self._display.write(describe_validation(row))

    def ended(self, *, is_complete: bool) -> None:
        self.is_complete = is_complete

    def catch_up(self) -> None:
        """Show the steps that are not shown yet."""
        if new_rows := self._rows[self._num_shown :]:
            self._num_shown = len(self._rows)
            self._display.show([], self._rows, new_rows, status_of(self._rows, [], is_running=True, silent_s=0.0))


def train(recipe: Recipe, folder: RunFolder | None) -> int:
    """Train, and return the exit code: 130 after Ctrl-C, unless the run was complete by then.

    Args:
        recipe: The run's recipe.
        folder: Folder of the run to continue; None: begin one.

    Raises:
        UserError: the Hub lacks the data, or the run folder cannot be used.
    """
    recipe = run_inputs.pin_inputs(recipe, with_sets=recipe.sft.validate_every > 0)
    settings = service_settings.for_sft(recipe)
    is_new = folder is None
    folder = folder or RunFolder.create(recipe.run)
    hide_secrets()
    with own_folder(folder, recipe, command="penstock sft", service="sft", is_new=is_new), lasting_output():
        is_interrupted = False
        model: Path | None = None

        async def run(stop: asyncio.Event) -> None:
            nonlocal is_interrupted, model
            display = open_display(f"run folder {folder.path}")
            shown = _Shown(display, folder, recipe, Pace())
            try:
                display.write(f"run folder {folder.path}")
                model = await train_supervised(settings, folder.path, stop, shown)
            except asyncio.CancelledError:  # a second Ctrl-C
                is_interrupted = True
                raise
            finally:
                shown.catch_up()
                display.close()
            is_interrupted = stop.is_set() and not shown.is_complete

        code = process.run(run)
        if model is not None:
            sys.stdout.write(f"model {model}\n")
    if is_new and code == process.EXIT_USER_ERROR:
        log.close_file()
        if folder.discard_unused():
            sys.stdout.write(f"run folder {folder.path} is removed: no step was taken\n")
    return process.EXIT_INTERRUPTED if is_interrupted else code
