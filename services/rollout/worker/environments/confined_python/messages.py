"""What the worker and a process that runs code say to each other: frames over a socket pair."""

import msgspec


class InterpreterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How code runs."""

    time_limit_s: float
    memory_limit_mb: int
    """What code may allocate beyond the interpreter itself."""
    max_characters: int
    """Of what it prints, and of its value."""
    modules: tuple[str, ...]
    """What it may import: all of it is imported before, because the process can open no file."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """To the process, once."""

    source: str


class Printed(msgspec.Struct, frozen=True, kw_only=True, tag="printed"):
    """What the code printed just now; it is told at once, so that it outlives the process."""

    text: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The code ended by itself."""

    value: str
    """Its last line's, if that is an expression with a value; as Python shows it."""
    error: str
    """The traceback, if it failed."""
    num_dropped: int
    """Characters printed beyond the limit."""


Report = Printed | Finished
