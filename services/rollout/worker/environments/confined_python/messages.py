"""Messages between the worker and a process that runs code: frames over a socket pair."""

import msgspec


class InterpreterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How code runs."""

    time_limit_s: float
    memory_limit_mb: int
    """Memory that code may allocate beyond the interpreter itself."""
    max_characters: int
    """Maximum characters of its output, and of its value."""
    modules: tuple[str, ...]
    """Modules that it may import. All are imported beforehand, because the process can open no file."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The code to run; sent once, to the process."""

    source: str


class Printed(msgspec.Struct, frozen=True, kw_only=True, tag="printed"):
    """Text that the code just printed; reported at once, so that it outlives the process."""

    text: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The code ended on its own."""

    value: str
    """The last line's value as Python shows it, if that line is an expression with a value."""
    error: str
    """The traceback, if it failed."""
    num_dropped: int
    """Characters printed beyond the limit."""


Report = Printed | Finished
