"""Records to bytes and back: msgpack, with numpy arrays as (dtype, shape, little-endian bytes).

Decoding trusts nothing: types, array lengths and each record's own invariants are checked, and bytes that are not the
record asked for raise `CorruptMessageError` instead of becoming a record that is wrong.
"""

import math
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.errors import CorruptMessageError

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|b1", "|u1"})
"""Array types that may travel; everything is little-endian."""


def encode(record: msgspec.Struct) -> bytes:
    """Return the record as msgpack.

    Raises:
        TypeError: an array's dtype is none of `DTYPES`, or a field holds something that is no data.
    """
    return _ENCODER.encode(record)


def decode(data: bytes, record_type: type[RecordT]) -> RecordT:
    """Return the record that `encode` made `data` from.

    Raises:
        CorruptMessageError: `data` is no such record.
    """
    try:
        return msgspec.msgpack.decode(data, type=record_type, dec_hook=_from_wire)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptMessageError(f"{len(data)} bytes are no {record_type.__name__}: {error}") from None


def _to_wire(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot travel")
    little = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
    if little.dtype.str not in DTYPES:
        raise TypeError(f"arrays of {value.dtype} cannot travel; use one of {sorted(DTYPES)}")
    return (little.dtype.str, value.shape, little.tobytes())


def _from_wire(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"cannot decode {kind}")
    match value:
        case [str(dtype), [*shape], bytes(data)] if dtype in DTYPES and all(type(n) is int and n >= 0 for n in shape):
            size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            if size_bytes != len(data):
                raise ValueError(f"array {dtype}{shape} wants {size_bytes} bytes, not {len(data)}")
            if dtype == "|b1" and data.translate(None, b"\x00\x01"):
                raise ValueError("a boolean array holds bytes other than 0 and 1")
            return np.frombuffer(data, dtype=dtype).reshape(shape)
        case _:
            raise ValueError("no array: want [dtype, shape, bytes]")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
