"""Findings of checks, and their severity."""

import dataclasses
import enum


class Status(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, but may be slow, run short of memory, or fail later."""
    FAULT = "fault"
    """A run does not start, or fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    """Name of the checked thing."""
    status: Status
    seen: str
    remedy: str = ""
    """What to do; empty if nothing needs to be done."""


def ok(name: str, seen: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name=name, status=Status.OK, seen=seen)


def warning(name: str, seen: str, remedy: str) -> Finding:
    """Return a problem with which a run starts."""
    return Finding(name=name, status=Status.WARNING, seen=seen, remedy=remedy)


def fault(name: str, seen: str, remedy: str) -> Finding:
    """Return a problem with which a run would fail."""
    return Finding(name=name, status=Status.FAULT, seen=seen, remedy=remedy)


def blamed(name: str, error: Exception) -> Finding:
    """Return the fault of an error whose message ends with the remedy, after a semicolon."""
    seen, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return fault(name, seen or remedy, remedy if seen else "correct it")


def gib(size_bytes: float) -> str:
    """Format a size: "3.2 GiB"."""
    return f"{size_bytes / 2**30:.1f} GiB"
