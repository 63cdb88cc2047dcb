"""What the kernel knows of processes."""

import contextlib
import itertools
import resource
from collections.abc import Iterator
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def open_files_left(pid: int, num_left: int) -> Iterator[None]:
    """Let another process open only `num_left` more files during the context."""
    open_files = {int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in itertools.count() if number not in open_files)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, num_left, None)), hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
