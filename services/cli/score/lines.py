"""The lines that `penstock score` reads and writes: one JSON object each, checked line by line."""

import dataclasses
import io
import json
import math
import re
import select
from collections.abc import Collection, Iterator
from typing import Any

from penstock.v1 import reward_pb2

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is not read."""
_CHUNK_BYTES = 2**20
_SURROGATE = re.compile("[\ud800-\udfff]")

INVALID = "INVALID"
"""The status of a line that cannot be sent; the service itself never answers with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the input: an item to verify, or what is wrong with it."""

    id: str | int | None
    """The line's own; None if it has none that can be read."""
    item: reward_pb2.VerifyItem | None = None
    """The item to verify; None for a bad line."""
    error: str = ""
    """What is wrong with the line, and the remedy."""


class LineReader:
    """Cuts a stream into windows of lines and parses them, with one window in memory."""

    def __init__(
        self, source: io.FileIO, *, name: str, profile: str, known_profiles: Collection[str], max_lines: int
    ) -> None:
        """`profile` is for lines without one; `name` is what errors call the stream."""
        self._source = source
        self._name = name
        self._profile = profile
        self._known_profiles = known_profiles
        self._max_lines = max_lines
        self._number = 0
        self.num_bytes = 0
        """Bytes read so far."""

    def windows(self) -> Iterator[list[Line]]:
        """At most `max_lines` lines at a time, without blank ones; an empty list whenever the input pauses."""
        rest, is_too_long = bytearray(), False
        while True:
            if not select.select([self._source], [], [], 0)[0]:
                yield []
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
            fields = _fields(text, is_first=self._number == 1)
            name = _name(fields)
            return Line(id=name, item=self._item(fields))
        except ValueError as error:
            return Line(id=name, error=f"{self._name}:{self._number}: {error}")

    def _item(self, fields: dict[str, Any]) -> reward_pb2.VerifyItem:
        golds = [*_golds(fields, "gold"), *_golds(fields, "golds")]
        if "gold" not in fields and "golds" not in fields:
            raise ValueError('field "gold" is missing; give the gold answer, a string or a list of strings')
        profile = _text(fields, "profile", default=self._profile)
        if profile not in self._known_profiles:
            known = ", ".join(sorted(self._known_profiles))
            raise ValueError(f'field "profile" = {_shown(profile)} is unknown; known: {known}')
        return reward_pb2.VerifyItem(
            golds=golds,
            response=_text(fields, "response"),
            prompt=_text(fields, "prompt", default=""),
            profile=profile,
            deadline_s=_deadline_s(fields),
        )


def write_verdict(line: Line, verdict: reward_pb2.Verdict) -> bytes:
    """The output line for a verified line of the input."""
    return _encoded(
        {
            "id": line.id,
            "score": verdict.score,
            "status": status_of(verdict),
            "extracted": verdict.extracted,
            "method": reward_pb2.VerdictMethod.Name(verdict.method).removeprefix("VERDICT_METHOD_"),
        }
    )


def write_invalid(line: Line) -> bytes:
    """The output line for a bad line of the input."""
    return _encoded(
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
    """The verdict's status without its prefix."""
    return reward_pb2.VerdictStatus.Name(verdict.status).removeprefix("VERDICT_STATUS_")


def _encoded(fields: dict[str, Any]) -> bytes:
    try:
        return f"{json.dumps(fields, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:  # an id with a lone surrogate, which only an escape can say
        return f"{json.dumps(fields)}\n".encode()


def _fields(text: bytes | None, *, is_first: bool) -> dict[str, Any]:
    if text is None:
        raise ValueError(f"the line is longer than {MAX_LINE_BYTES} bytes; shorten the response")
    if is_first:
        text = text.removeprefix(b"\xef\xbb\xbf")
    try:
        fields = json.loads(text.decode(errors="surrogatepass"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} is {text[error.start]:#04x}; convert the file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}; write one JSON object per line") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON that can be read: {error}; write one JSON object per line") from None
    if not isinstance(fields, dict):
        raise ValueError(f'{_shown(fields)} is not a JSON object; write {{"id": ..., "gold": ..., "response": ...}}')
    return fields


def _name(fields: dict[str, Any]) -> str | int:
    if "id" not in fields:
        raise ValueError('field "id" is missing; give each line one, a string or an integer')
    value = fields["id"]
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ValueError(f'field "id" = {_shown(value)} is neither a string nor an integer; write it as a string')
    return value


def _text(fields: dict[str, Any], key: str, *, default: str | None = None) -> str:
    value = fields.get(key, default)
    if value is None and key not in fields:
        raise ValueError(f'field "{key}" is missing; give the text')
    if not isinstance(value, str):
        raise ValueError(f'field "{key}" = {_shown(value)} is not a string; write it as one')
    return _without_surrogates(value)


def _golds(fields: dict[str, Any], key: str) -> list[str]:
    value = fields.get(key, [])
    golds = [value] if isinstance(value, str) else value
    if not isinstance(golds, list) or not all(isinstance(gold, str) for gold in golds):
        raise ValueError(f'field "{key}" = {_shown(value)} is neither a string nor a list of strings; quote the answer')
    return [_without_surrogates(gold) for gold in golds]


def _deadline_s(fields: dict[str, Any]) -> float:
    value = fields.get("deadline_s", 0.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f'field "deadline_s" = {_shown(value)} is not a duration; give seconds > 0')
    return float(min(value, 1e6))  # the service has a limit of its own, and the contract's float one of 3e38


def _without_surrogates(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)  # which UTF-8 cannot carry


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # it was read a few calls further up
        return "what is nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
