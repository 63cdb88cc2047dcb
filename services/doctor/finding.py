"""What a check found, and how bad it is."""

import dataclasses
import enum


class Status(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, and may be slow, short of memory, or fail later."""
    FAULT = "fault"
    """A run does not start, or fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    """Of what was looked at."""
    status: Status
    seen: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def ok(name: str, seen: str) -> Finding:
    """All is well."""
    return Finding(name=name, status=Status.OK, seen=seen)


def warning(name: str, seen: str, remedy: str) -> Finding:
    """A run starts all the same."""
    return Finding(name=name, status=Status.WARNING, seen=seen, remedy=remedy)


def fault(name: str, seen: str, remedy: str) -> Finding:
    """A run would fail."""
    return Finding(name=name, status=Status.FAULT, seen=seen, remedy=remedy)


def blamed(name: str, error: Exception) -> Finding:
    """The fault of an error whose message ends with the remedy, after a semicolon."""
    seen, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return fault(name, seen or remedy, remedy if seen else "correct it")


def gib(size_bytes: float) -> str:
    """A size to read: "3.2 GiB"."""
    return f"{size_bytes / 2**30:.1f} GiB"
