"""Writes files that other processes, or the next start of this one, read."""

import os
import secrets
from pathlib import Path


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file of which readers see everything or nothing, whatever kills this process; folders are made.

    Text is written as UTF-8. It need not survive the machine's own end: nothing is flushed to the disk.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
