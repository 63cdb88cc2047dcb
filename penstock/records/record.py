"""Base class of all records on the bus.

Versioning: within `RECORD_VERSION` fields are only added, with defaults, and readers ignore unknown fields, so that
processes of neighbouring releases share a bus. A change that breaks this raises `RECORD_VERSION`; records of another
version are refused with a reason, never misread.
"""

from typing import Any, Final

import msgspec
import numpy as np

RECORD_VERSION: Final = 2
"""Version 1 had no field `record_version`."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything on the bus: immutable, validated at construction and when decoded."""


class Envelope(Record, frozen=True, kw_only=True):
    """Base of records that are complete messages."""

    record_version: int = RECORD_VERSION


def to_builtins(record: Record) -> Any:
    """Return the record as plain data for JSON, with arrays as lists and images as their sizes."""

    def convert(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else f"<{len(value)} bytes>"

    return msgspec.to_builtins(record, builtin_types=(), enc_hook=convert)
