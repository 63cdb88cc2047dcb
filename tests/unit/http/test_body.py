"""Bodies of HTTP requests: what they count, who is refused, and that room comes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.http.body import Bodies, GoneError, release_body
from penstock.http.boundary import Boundary
from penstock.http.status import error_body
from penstock.runtime.security import Security
from tests.support.waiting import HANG_S, until

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
        assert whole.data == body
        yield


async def refusal(bodies: Bodies, body: bytes) -> int:
    """The status that a request with that body, in two parts, is refused with."""
    with pytest.raises(HTTPException) as raised:
        async with bodies.whole(receiving(body[:-1], body[-1:])):
            pass
    return raised.value.status_code


async def test_a_body_counts_until_its_request_is_answered() -> None:
    """The second of two that do not fit together may come back; one that is larger than any may be is not welcome."""
    bodies = Bodies(max_body_bytes=len(_TEXT))
    async with held(bodies, _TEXT):
        assert bodies.num_bytes == len(_TEXT)
        assert await refusal(bodies, _TEXT) == 429
        assert bodies.num_bytes == len(_TEXT)
    assert bodies.num_bytes == 0
    assert await refusal(bodies, _TEXT + b" ") == 413
    assert bodies.num_bytes == 0


async def test_a_released_body_counts_no_more() -> None:
    """Though its request is still being answered; to release it again, or where there is none, changes nothing."""
    bodies, scope = Bodies(max_body_bytes=len(_TEXT)), dict[str, Any]()
    release_body(scope)
    async with bodies.whole(receiving(_TEXT)) as body:
        body.offer_in(scope)
        release_body(scope)
        assert (bodies.num_bytes, body.data) == (0, b"")
        async with held(bodies, _TEXT):
            release_body(scope)
            assert bodies.num_bytes == len(_TEXT)
    assert bodies.num_bytes == 0


async def test_a_large_body_of_declared_size_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, and before any of it is read; from then on its room is its own. It does not wait for ever."""
    bodies, begun = Bodies(max_body_bytes=len(_TEXT), max_wait_s=HANG_S), list[int]()
    may_end = asyncio.Event()

    async def answer(number: int) -> None:
        async with bodies.whole(receiving(_TEXT[:-1], _TEXT[-1:]), declared_bytes=len(_TEXT)) as body:
            assert body.data == _TEXT
            begun.append(number)
            await may_end.wait()

    async with asyncio.TaskGroup() as group:
        async with held(bodies, _TEXT):
            for number in range(3):
                group.create_task(answer(number))
            await asyncio.sleep(0)
            assert (bodies.num_bytes, begun) == (len(_TEXT), [])
        await until(lambda: begun == [0])
        assert bodies.num_bytes == len(_TEXT)
        monkeypatch.setattr(bodies, "_max_wait_s", 1e-3)
        with pytest.raises(HTTPException) as refused:
            await answer(3)
        assert refused.value.status_code == 429
        may_end.set()
    assert (bodies.num_bytes, begun) == (0, [0, 1, 2])


async def test_a_server_reads_from_the_header_what_a_body_will_take() -> None:
    """So that more large requests come at once than have room together."""
    statuses, may_end = list[int](), asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await may_end.wait()
        await Response()(scope, receive, send)

    async def send(message: Message) -> None:
        if "status" in message:
            statuses.append(message["status"])

    boundary = Boundary(
        answer, max_body_bytes=len(_TEXT), body_wait_s=HANG_S, make_error_body=error_body, security=Security()
    )
    declared = [(b"content-length", b"%d" % len(_TEXT))]
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            messages: list[Message] = [{"type": "http.request", "body": _TEXT}]
            scope = {"type": "http", "method": "POST", "path": "/", "headers": declared}

            async def receive(messages: list[Message] = messages) -> Message:
                return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

            group.create_task(boundary(scope, receive, send))
        await until(lambda: boundary._bodies.num_bytes == len(_TEXT))
        may_end.set()
    assert statuses == [200] * 3


async def test_a_reserved_body_is_read_though_small_ones_have_come() -> None:
    """They may take room that no further large one would get."""
    bodies = Bodies(max_body_bytes=2**20, max_wait_s=HANG_S)
    small = bytes(2**16)
    arriving = asyncio.Queue[Message]()
    async with held(bodies, bytes(2**20 - 2**18)), contextlib.AsyncExitStack() as stack:
        reading = asyncio.create_task(
            stack.enter_async_context(bodies.whole(arriving.get, declared_bytes=2**20))  # seven eighths in all
        )
        await until(lambda: bodies.num_bytes == 2**21 - 2**18)
        async with held(bodies, small), held(bodies, small):
            for is_last in (False, True):
                arriving.put_nowait({"type": "http.request", "body": bytes(2**19), "more_body": not is_last})
            assert (await reading).data == bytes(2**20)
    assert bodies.num_bytes == 0


async def test_small_bodies_find_room_where_large_ones_have_all_of_theirs() -> None:
    """An eighth is theirs alone."""
    bodies = Bodies(max_body_bytes=2**20)
    async with held(bodies, bytes(2**20)), held(bodies, bytes(2**19)):
        assert await refusal(bodies, bytes(2**18 + 1)) == 429
        async with held(bodies, _SMALL):
            pass


async def test_a_body_counts_while_it_arrives_and_no_more_when_its_client_goes() -> None:
    """What comes in parts has room taken for each; and a cancelled request gives all of it back."""
    bodies = Bodies(max_body_bytes=2**24)
    with pytest.raises(GoneError):
        async with bodies.whole(receiving(_TEXT, _TEXT, ends=False)):
            pass
    assert bodies.num_bytes == 0

    messages = [{"type": "http.request", "body": _TEXT, "more_body": True}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def read() -> None:
        async with bodies.whole(receive):
            pass

    reading = asyncio.create_task(read())
    await until(lambda: bodies.num_bytes == len(_TEXT))
    reading.cancel()
    await asyncio.wait((reading,))
    assert bodies.num_bytes == 0
