"""Opens consoles for tables: as wide as the terminal, or elsewhere as wide as the table."""

from rich.console import Console

_PLAIN_WIDTH = 160


def open_console() -> Console:
    """Return a console on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)
