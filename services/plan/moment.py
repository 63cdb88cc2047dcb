"""What is in a memory at a moment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The parts in a memory, of a GPU or of the machine, at a moment that may be its fullest."""

    name: str
    parts: tuple[Part, ...]
    room_bytes: int | None = None
    """Bytes that they may take; None: those of the process."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)
