"""The base of everything that travels on the bus."""

from typing import Any

import msgspec
import numpy as np


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that travels: immutable, and decoded strictly."""


def to_builtins(record: Record) -> Any:
    """The record as plain data for JSON, arrays as lists and images as their sizes."""

    def convert(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else f"<{len(value)} bytes>"

    return msgspec.to_builtins(record, builtin_types=(), enc_hook=convert)
