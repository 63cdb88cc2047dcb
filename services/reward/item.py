"""A response to verify, with all inputs of the verification."""

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
    """Name of the profile to verify by."""
    prompt: str = ""
    """The prompt; only custom verifiers and the profile `remote` read it."""
    deadline_s: float = 0.0
    """Wall-clock limit in seconds; 0 takes the service's limit."""
