"""Writes files that other processes, or the next start of this one, read."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(file: Path) -> Iterator[IO[bytes]]:
    """Yield an open file that replaces `file` at the end; after an error, `file` is as it was.

    Readers see everything or nothing, whatever kills this process. It need not survive the machine's own end: nothing
    is flushed to the disk.

    Raises:
        OSError: it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as written:
            yield written
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file as `replacing` does; text is written as UTF-8, folders are made.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as written:
        written.write(content.encode() if isinstance(content, str) else content)
