"""What the kernel knows of processes."""

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process runs: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
