"""A response to verify, with everything that verifying it needs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One response to verify."""

    golds: Sequence[str]
    """Gold answers; one match suffices."""
    response: str
    """The policy's own text."""
    profile: str
    """The profile to verify by, by name."""
    prompt: str = ""
    """What was asked; only custom verifiers and the profile `remote` look at it."""
    deadline_s: float = 0.0
    """Wall-clock limit in seconds; 0 takes the service's."""
