"""What the server and its workers say to each other: msgpack over a socket pair, each record length-prefixed."""

import struct

import msgspec

from services.reward.verdict import Method, Status

HEADER = struct.Struct("<I")
"""Length of the record that follows, in bytes."""


class SymbolicGold(msgspec.Struct, frozen=True, kw_only=True):
    """A gold answer that neither text nor exact value decided."""

    text: str
    use_text: bool
    """Compare with the answer's whole text (an equation), not with its body."""
    value: str
    """Its exact value as a fraction, if it is a number; else empty."""
    tolerance: str
    """Largest difference from `value` that is right, as a fraction."""


class SymbolicTask(msgspec.Struct, frozen=True, kw_only=True, tag="symbolic"):
    """An answer to compare with gold answers; one match suffices."""

    golds: tuple[SymbolicGold, ...]
    body: str
    """The answer, without the name that it was given."""
    text: str
    """All of the answer."""


Task = SymbolicTask
"""Everything that a worker can be asked; a union of tagged structs."""


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """To a worker: one item and the processor time that it may take."""

    task: Task
    cpu_limit_s: int


class WorkerReply(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker: its finding."""

    status: Status
    credit: float = 0.0
    extracted: str = ""
    """The answer that it judged, where it found that itself."""
    method: Method = Method.UNSPECIFIED


def frame(record: msgspec.Struct) -> bytes:
    """The record as it goes over the socket."""
    data = msgspec.msgpack.encode(record)
    return HEADER.pack(len(data)) + data
