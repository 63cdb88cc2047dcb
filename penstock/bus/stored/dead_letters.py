"""Messages that were given up, kept with the reason: they can be read, and put back on their queue.

A dead letter is the unchanged message, with the reason, its queue and its id in headers. It can be read whatever record
it holds, including one of another version.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack
import nats.js.errors
from nats.js import api

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.errors import InvalidRequestError, UnavailableError
from penstock.records.prompt import REQUEUED

REASON = "Penstock-Reason"
SUBJECT = "Penstock-Subject"
MESSAGE_ID = "Penstock-Message-Id"

_MAX_REASON_BYTES = 2000
_MAX_SHOWN_CHARS = 400
_MAX_SHOWN_ITEMS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that was given up."""

    number: int
    """Its number in the stream of dead letters, by which commands name it."""
    reason: str
    subject: str
    """Subject of the queue that it came from."""
    message_id: str
    """Its id on that queue."""
    age_s: float
    payload: bytes


def letter_headers(*, reason: str, subject: str, message_id: str) -> dict[str, str]:
    """Return the headers of a letter; together less than 3,000 bytes, plus the id."""
    # On one line of ASCII: nats-py does not read back anything else unchanged.
    line = " ".join(reason.split()).encode("ascii", "backslashreplace")[:_MAX_REASON_BYTES].decode()
    return {REASON: line, SUBJECT: subject, MESSAGE_ID: message_id}


async def has_letters(bus: Bus) -> bool:
    """Return whether the server has the run's stream of dead letters, as it has once a trainer, a worker or an
    evaluation has begun; a router alone needs none.

    Raises:
        UnavailableError: the server does not answer.
    """
    try:
        await bus.jetstream.stream_info(bus.dead.name)
    except nats.js.errors.NotFoundError:
        return False
    except BUS_ERRORS as error:
        raise UnavailableError(f"NATS at {bus.config.url} does not answer: {describe(error)}") from None
    return True


async def list_letters(bus: Bus, *, after: int = 0, limit: int = 100) -> list[DeadLetter]:
    """Return the oldest letters with a number above `after`.

    Raises:
        UnavailableError: the server does not answer.
    """
    letters: list[DeadLetter] = []
    try:
        while len(letters) < limit:
            message = await bus.jetstream.get_msg(bus.dead.name, seq=after + 1, subject=bus.dead.subject, next=True)
            letters.append(_letter(message))
            after = letters[-1].number
    except nats.js.errors.NotFoundError:
        return letters
    except BUS_ERRORS as error:
        raise UnavailableError(f"the dead letters cannot be read: {describe(error)}") from None
    return letters


async def read_letter(bus: Bus, number: int) -> DeadLetter:
    """Return the letter with this number.

    Raises:
        InvalidRequestError: there is none.
        UnavailableError: the server does not answer.
    """
    try:
        return _letter(await bus.jetstream.get_msg(bus.dead.name, seq=number))
    except nats.js.errors.NotFoundError:
        raise InvalidRequestError(f"there is no dead letter {number}; `penstock bus letters` lists them") from None
    except BUS_ERRORS as error:
        raise UnavailableError(f"dead letter {number} cannot be read: {describe(error)}") from None


async def requeue_letter(bus: Bus, number: int) -> DeadLetter:
    """Put the letter's message back on its queue, under an id of its own, and remove the letter.

    Raises:
        InvalidRequestError: there is no such letter, or its queue is not one of this run's.
        SetupError: the server no longer has the queue.
        UnavailableError: the server does not answer.
    """
    letter = await read_letter(bus, number)
    queue = next((stream for stream in (bus.prompts, bus.groups) if stream.subject == letter.subject), None)
    if queue is None:
        raise InvalidRequestError(f"dead letter {number} is from {letter.subject!r}, which is no queue of this run")
    # Its own id would be taken for a repetition of the given-up message.
    await bus.publish(queue, letter.payload, message_id=f"{REQUEUED}/{number}/{letter.message_id}", headers={})
    try:
        await bus.jetstream.delete_msg(bus.dead.name, number)
    except BUS_ERRORS as error:
        raise UnavailableError(
            f"dead letter {number} is queued again, but was not removed: {describe(error)}"
        ) from None
    return letter


def show_payload(payload: bytes) -> Any:
    """Return the payload as plain values for JSON, whatever record it is: long text cut, bytes and arrays as sizes.

    Bytes that are not msgpack, or such as nobody writes, are shown as such.
    """
    try:
        return _shown(msgpack.unpackb(payload, strict_map_key=False))
    except (TypeError, ValueError, msgpack.UnpackException):  # a TypeError: a map whose keys are no values
        return f"{len(payload)} bytes that are not msgpack: {payload[:64]!r}"
    except RecursionError:
        return f"{len(payload)} bytes of msgpack that is nested too deep: {payload[:64]!r}"


def _shown(value: Any) -> Any:
    match value:
        case bytes():
            return f"<{len(value)} bytes>"
        case str() if len(value) > _MAX_SHOWN_CHARS:
            return f"{value[:_MAX_SHOWN_CHARS]}... ({len(value)} characters)"
        case [str(dtype), [*shape], bytes()]:
            return f"<array {dtype} {shape}>"
        case [*items]:
            more = [f"... ({len(items)} items)"] if len(items) > _MAX_SHOWN_ITEMS else []
            return [*map(_shown, items[:_MAX_SHOWN_ITEMS]), *more]
        case dict():
            return {str(key): _shown(each) for key, each in value.items()}
        case None | bool() | int() | float() | str():
            return value
        case _:  # msgpack's timestamps and extension types
            return repr(value)


def _letter(message: api.RawStreamMsg) -> DeadLetter:
    assert message.seq is not None
    assert message.time is not None
    headers: Mapping[str, str] = message.headers or {}
    return DeadLetter(
        number=message.seq,
        reason=headers.get(REASON, ""),
        subject=headers.get(SUBJECT, ""),
        message_id=headers.get(MESSAGE_ID, ""),
        age_s=max(0.0, time.time() - message.time.timestamp()),
        payload=message.data or b"",
    )
