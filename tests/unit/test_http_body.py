"""Bodies of HTTP requests: what they count, who is refused, and that room comes back."""

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from penstock.http.body import Bodies, GoneError
from penstock.http.json_body import memory_of, parse_json

_TEXT = b'"' + b"x" * 2**20 + b'"'
_SMALL = b'{"a": 1}'


def receiving(*parts: bytes, ends: bool = True) -> Receive:
    """What an ASGI server gives for a body of `parts`; then the client goes away, or nothing more comes."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages[-1]["more_body"] = False
    messages.reverse()

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive


@contextlib.asynccontextmanager
async def held(bodies: Bodies, body: bytes) -> AsyncIterator[None]:
    """A request with that body, while it is answered."""
    async with bodies.whole(receiving(body)) as whole:
        assert whole == body
        yield


async def refusal(bodies: Bodies, body: bytes) -> int:
    """The status that a request with that body, in two parts, is refused with."""
    with pytest.raises(HTTPException) as raised:
        async with bodies.whole(receiving(body[:-1], body[-1:])):
            pass
    return raised.value.status_code


async def test_a_body_counts_until_its_request_is_answered() -> None:
    """The second of two that do not fit together may come back; the one that fits nowhere may not."""
    bodies = Bodies(max_body_bytes=2**24, max_memory_bytes=8 * 2**20)
    async with held(bodies, _TEXT):
        taken = bodies.memory_bytes
        assert taken == memory_of(_TEXT)
        assert await refusal(bodies, _TEXT) == 429
        assert bodies.memory_bytes == taken
    assert bodies.memory_bytes == 0
    async with held(bodies, _TEXT):
        pass
    assert await refusal(bodies, b"[" + b"[]," * 2**20 + b"0]") == 413
    assert bodies.memory_bytes == 0


async def test_small_bodies_find_room_where_large_ones_have_all_of_theirs() -> None:
    """An eighth is theirs alone."""
    bodies = Bodies(max_body_bytes=2**24, max_memory_bytes=int(memory_of(_TEXT) / 0.86))
    async with held(bodies, _TEXT):
        assert await refusal(bodies, _TEXT[: 2**17]) == 429
        async with held(bodies, _SMALL):
            pass


async def test_a_body_counts_while_it_arrives_and_no_more_when_its_client_goes() -> None:
    """What comes in parts has room taken for each; and a cancelled request gives all of it back."""
    bodies = Bodies(max_body_bytes=2**24, max_memory_bytes=2**23)
    with pytest.raises(GoneError):
        async with bodies.whole(receiving(_TEXT, _TEXT, ends=False)):
            pass
    assert bodies.memory_bytes == 0

    messages = [{"type": "http.request", "body": _TEXT, "more_body": True}]

    async def receive() -> Message:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop()

    async def read() -> None:
        async with bodies.whole(receive):
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    assert bodies.memory_bytes == len(_TEXT)
    reading.cancel()
    await asyncio.wait((reading,))
    assert bodies.memory_bytes == 0


_N = 20_000
_KINDS = {
    "a text": b'["' + b"x" * _N * 5 + b'"]',
    "an emoji": json.dumps(["\N{GRINNING FACE}" + "x" * _N * 5]).encode(),
    "an emoji in UTF-8": '["\N{GRINNING FACE}'.encode() + b"x" * _N * 5 + b'"]',
    "greek": '["\N{GREEK SMALL LETTER ALPHA}'.encode() + b"x" * _N * 5 + b'"]',
    "a lone surrogate": rb'["\ud83d' + b"x" * _N * 5 + b'"]',
    "empty lists": b"[" + b"[]," * _N + b"0]",
    "nested lists": b"[" + b"[[[[[[[[]]]]]]]]," * (_N // 8) + b"0]",
    "objects": b"[" + b'{"a":"bc"},' * _N + b"0]",
    "objects of unlike keys": b"[" + b",".join(b'{"%x":"ab"}' % n for n in range(_N)) + b"]",
    "texts": b"[" + b'"ab",' * _N + b"0]",
    "numbers": b"[" + b"10," * _N + b"0]",
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("numbers_as_text", [False, True])
def test_reading_takes_no_more_memory_than_was_told(kind: str, numbers_as_text: bool) -> None:
    """At its peak, beside the body itself, and counted without reading it."""
    body = _KINDS[kind]
    tracemalloc.start()
    try:
        told = memory_of(body)
        tracemalloc.reset_peak()
        parse_json(body, unique_keys=True, numbers_as_text=numbers_as_text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak + len(body) <= told
    assert told < 90 * len(body)


def test_commas_and_brackets_in_texts_are_no_values() -> None:
    """A long answer in LaTeX counts as text, escaped quotes, backslashes and all."""
    latex = r"\frac{1}{2}, [\"a\", \\ {b}: " * 1000
    body = json.dumps({"items": [{"golds": ["5"], "response": latex, "profile": "math"}]}).encode()
    assert 4 * len(body) < memory_of(body) < 4 * len(body) + 20 * 128
