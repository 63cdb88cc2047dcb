"""The file that a person names for a command's output: a good one stays until the new one is complete."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.runtime.files import replacing


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield an open file that replaces the one at `path` at the end; after an error, that is as it was.

    A link stays, and what it leads to is replaced, with its rights. A device or a pipe, such as /dev/stdout, is written
    itself.

    Raises:
        OSError: it cannot be written.
    """
    is_replaced = path.is_file() or not path.exists()
    with replacing(path.resolve()) if is_replaced else path.open("wb") as written:
        if path.is_file():
            os.fchmod(written.fileno(), stat.S_IMODE(path.stat().st_mode))
        yield written
