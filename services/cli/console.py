"""Where commands print tables: a terminal as wide as it is, anything else as wide as a table needs."""

from rich.console import Console

_PLAIN_WIDTH = 160


def open_console() -> Console:
    """A console on standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)
