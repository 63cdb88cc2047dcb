"""Opens consoles for tables, as wide as the terminal, or elsewhere as wide as the table; and words for their cells."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 160


def open_console() -> "Console":
    """Return a console on standard output."""
    from rich.console import Console  # slow to import, so only where a table is printed

    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def describe_age(age_s: float) -> str:
    """Return seconds in the largest unit of which there are two: "3 h"."""
    for unit, seconds in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def describe_size(size_bytes: int) -> str:
    """Return a number of bytes: "3.2 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes / 2**10:.0f} KiB"
