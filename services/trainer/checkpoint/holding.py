"""Keeps a live run from deleting a checkpoint that another process reads.

A reader shares a lock on the checkpoint's manifest, and a run deletes no checkpoint whose manifest is locked; its next
save tries again. Only a step that is saved again replaces a checkpoint that is read. However a reader ends, the kernel
unlocks the file, so nothing is left behind. File systems without locks hold nothing.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.errors import SetupError

MANIFEST: Final = "manifest.json"
"""The file of a checkpoint that lists the others."""


@contextmanager
def held_model(folder: Path) -> Iterator[None]:
    """Keep the checkpoint whose model or adapters are in `folder` during the context; do nothing for other models.

    Raises:
        SetupError: its run has just deleted it.
    """
    manifest = folder.parent / MANIFEST
    if not manifest.is_file() and folder.exists():
        yield
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(manifest.open("rb"))
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH)  # a run has it locked for the time of a rename
            is_there = os.path.samestat(os.fstat(file.fileno()), manifest.stat())
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise SetupError(
                f"{folder.parent} has just been deleted, as a live run deletes checkpoints beyond "
                "trainer.keep_checkpoints; give the command again"
            )
        yield


@contextmanager
def taken(checkpoint: Path) -> Iterator[bool]:
    """Yield whether nobody reads the checkpoint, and let nobody begin to during the context."""
    try:
        file = (checkpoint / MANIFEST).open("r+b")  # NFS gives exclusive locks to writers only
    except OSError:
        yield True  # it is incomplete
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
