"""The run folder of a command, from the moment that the command takes it.

Invariants: a folder that was made for the command is removed if the command could not begin to use it. The folder of an
earlier run keeps its recipe until the command has made its checks and writes another. So an override that the checks
refuse is not kept.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.runtime.disk_space import disk_full_reported
from penstock.telemetry import log
from services.launch.run_folder import RunFolder
from services.recipe import Recipe


@contextmanager
def own_folder(folder: RunFolder, recipe: Recipe, *, command: str, service: str, is_new: bool) -> Iterator[None]:
    """Keep other commands out of `folder` during the context; it has this process's log, and if it is new the recipe.

    Args:
        folder: The run's folder.
        recipe: The recipe of this start.
        command: This command, which the folder notes.
        service: This process's name in its log.
        is_new: Whether the folder was made for this command.

    Raises:
        SetupError: another command uses the folder, it cannot be written, or its disk is full.
    """
    has_begun = False
    try:
        with folder.locked():
            with disk_full_reported(folder.path, "make room and start the command again"):
                folder.note_command(command)
                if is_new:
                    folder.write_config(recipe)
                else:
                    folder.renew_config()
                log.configure(recipe.log, service=service, file=folder.launcher_log)
            has_begun = True
            yield
    finally:
        if is_new and not has_begun:
            log.close_file()
            folder.discard_unused()
