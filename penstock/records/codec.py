"""Records to bytes and back: plain msgpack, with numpy arrays as (dtype, shape, little-endian bytes).

Decoding trusts nothing: types, array lengths and each record's own invariants are checked. Bytes that are not the
expected record, in the version that this release reads, raise `CorruptMessageError`.
"""

import math
from typing import Any, TypeVar

import msgspec
import numpy as np

from penstock.errors import CorruptMessageError
from penstock.records.record import RECORD_VERSION, Envelope
from penstock.runtime.text import printable

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|b1", "|u1"})
"""Array types that a record may hold; everything is little-endian."""


def encode(record: msgspec.Struct) -> bytes:
    """Return the record as msgpack; lone surrogates, which UTF-8 cannot encode, become U+FFFD.

    Raises:
        TypeError: an array's dtype is not in `DTYPES`, or a field holds a value that cannot be encoded.
    """
    try:
        return _ENCODER.encode(record)
    except UnicodeEncodeError:  # an error of a person's own code, or what a tool or an agent said
        return _ENCODER.encode(_printable(record))


def decode(data: bytes, record_type: type[RecordT]) -> RecordT:
    """Return the record that `encode` turned into `data`.

    Raises:
        CorruptMessageError: `data` is not such a record, or one of another version.
    """
    try:
        if issubclass(record_type, Envelope):
            _require_version(data, record_type)
        return msgspec.msgpack.decode(data, type=record_type, dec_hook=_from_wire)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptMessageError(f"{len(data)} bytes are not a {record_type.__name__}: {error}") from None


def _printable(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case msgspec.Struct():
            return type(value)(**{name: _printable(getattr(value, name)) for name in value.__struct_fields__})
        case dict():
            return {_printable(key): _printable(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_printable, value))
    return value


class _Header(msgspec.Struct):
    record_version: int = 1


def _require_version(data: bytes, record_type: type) -> None:
    version = msgspec.msgpack.decode(data, type=_Header).record_version
    if version != RECORD_VERSION:
        raise CorruptMessageError(
            f"a {record_type.__name__} in record version {version}, but this release reads version {RECORD_VERSION}; "
            "finish the run with the release that began it, or start a new one"
        )


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
