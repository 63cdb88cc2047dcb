"""Reads and writes the lines of `penstock score`: one JSON object each, checked line by line."""

import dataclasses
import io
import math
import select
from collections.abc import Collection, Iterator
from typing import Any

from penstock.v1 import reward_pb2
from services.cli.json_lines import MAX_LINE_BYTES, encode, read_golds, read_id, read_object, read_text, shown

_CHUNK_BYTES = 2**20
_LOOK_EVERY_S = 0.2
"""A signal that comes in the moment before a read waits is handled when the read has ended; so no read waits."""
_EXAMPLE = '{"id": ..., "gold": ..., "response": ...}'

INVALID = "INVALID"
"""The status of a line that cannot be sent; the service itself never answers with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input: an item to verify, or the line's fault."""

    id: str | int | None
    """The line's own id; None if it has no readable one."""
    item: reward_pb2.VerifyItem | None = None
    """The item to verify; None for a bad line."""
    error: str = ""
    """What is wrong with the line, and the remedy."""


class LineReader:
    """Cuts a stream into windows of lines and parses them, with one window in memory."""

    def __init__(
        self, source: io.FileIO, *, name: str, profile: str, known_profiles: Collection[str], max_lines: int
    ) -> None:
        """Read `source`; `profile` is for lines without one, `name` is the stream's name in errors."""
        self._source = source
        self._name = name
        self._profile = profile
        self._known_profiles = known_profiles
        self._max_lines = max_lines
        self._number = 0
        self.num_bytes = 0
        """Bytes read so far."""

    def windows(self) -> Iterator[list[Line]]:
        """Yield at most `max_lines` lines at a time, without blank ones; an empty list whenever the input pauses."""
        rest, is_too_long = bytearray(), False
        while True:
            if not select.select([self._source], [], [], 0)[0]:
                yield []
            while not select.select([self._source], [], [], _LOOK_EVERY_S)[0]:
                pass
            chunk = self._source.read(_CHUNK_BYTES)
            if not chunk:
                break
            self.num_bytes += len(chunk)
            first, *others = chunk.split(b"\n")
            is_too_long = is_too_long or len(rest) + len(first) > MAX_LINE_BYTES
            if is_too_long:
                rest.clear()
            else:
                rest += first
            if others:
                yield from self._cut([None if is_too_long else bytes(rest), *others[:-1]])
                rest, is_too_long = bytearray(others[-1]), False
        if rest or is_too_long:
            yield from self._cut([None if is_too_long else bytes(rest)])

    def _cut(self, texts: list[bytes | None]) -> Iterator[list[Line]]:
        for start in range(0, len(texts), self._max_lines):
            parsed = map(self._parse, texts[start : start + self._max_lines])
            if window := [line for line in parsed if line is not None]:
                yield window

    def _parse(self, text: bytes | None) -> Line | None:
        self._number += 1
        if text is not None and not text.strip():
            return None
        name: str | int | None = None
        try:
            fields = read_object(text, is_first=self._number == 1, example=_EXAMPLE)
            name = read_id(fields)
            return Line(id=name, item=self._item(fields))
        except ValueError as error:
            return Line(id=name, error=f"{self._name}:{self._number}: {error}")

    def _item(self, fields: dict[str, Any]) -> reward_pb2.VerifyItem:
        golds = [*read_golds(fields, "gold"), *read_golds(fields, "golds")]
        if "gold" not in fields and "golds" not in fields:
            raise ValueError('field "gold" is missing; give the gold answer, a string or a list of strings')
        profile = read_text(fields, "profile", default=self._profile)
        if profile not in self._known_profiles:
            known = ", ".join(sorted(self._known_profiles))
            raise ValueError(f'field "profile" = {shown(profile)} is unknown; known: {known}')
        return reward_pb2.VerifyItem(
            golds=golds,
            response=read_text(fields, "response"),
            prompt=read_text(fields, "prompt", default=""),
            profile=profile,
            deadline_s=_deadline_s(fields),
        )


def write_verdict(line: Line, verdict: reward_pb2.Verdict) -> bytes:
    """Return the output line for a verified line of the input."""
    return encode(
        {
            "id": line.id,
            "score": verdict.score,
            "status": status_of(verdict),
            "extracted": verdict.extracted,
            "method": reward_pb2.VerdictMethod.Name(verdict.method).removeprefix("VERDICT_METHOD_"),
        }
    )


def write_invalid(line: Line) -> bytes:
    """Return the output line for a bad line of the input."""
    return encode(
        {
            "id": line.id,
            "score": None,
            "status": INVALID,
            "extracted": "",
            "method": "UNSPECIFIED",
            "error": line.error,
        }
    )


def status_of(verdict: reward_pb2.Verdict) -> str:
    """Return the verdict's status without its prefix."""
    return reward_pb2.VerdictStatus.Name(verdict.status).removeprefix("VERDICT_STATUS_")


def _deadline_s(fields: dict[str, Any]) -> float:
    value = fields.get("deadline_s", 0.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f'field "deadline_s" = {shown(value)} is not a duration; give seconds > 0')
    return float(min(value, 1e6))  # the service has its own limit, and the contract's float one of 3e38
