"""Applications read large bodies beside the event loop, and refuse wrong ones like small ones."""

import asyncio
import gc
import threading
from typing import Annotated, Any

import httpx
import pydantic
import pytest
from fastapi import Body, FastAPI

from penstock.errors import InvalidRequestError
from penstock.http import app as http_app
from penstock.http.app import make_app
from penstock.http.json_body import parse_json
from tests.support.waiting import promptly, settled, until

_SIZES = pytest.mark.parametrize("size_bytes", [1, 2**20])


class Text(pydantic.BaseModel):
    """Notes which threads validate it."""

    model_config = pydantic.ConfigDict(extra="forbid")
    text: str
    _readers: list[int] = pydantic.PrivateAttr(default_factory=list)

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _note(cls, value: Any, validate: Any) -> "Text":
        text: Text = validate(value)
        text._readers.append(threading.get_ident())
        return text


def echoing_app() -> FastAPI:
    """Returns the length of texts."""
    app = make_app(title="test", description="", version="0")

    @app.post("/length")
    async def length(body: Text) -> int:
        return len(body.text)

    @app.post("/readers")
    async def readers(body: Text) -> list[int]:
        return body._readers

    @app.post("/lengths")
    async def lengths(body: dict[str, str]) -> list[int]:
        return [len(each) for each in body.values()]

    @app.post("/both")
    async def both(first: Annotated[Text, Body()], second: Annotated[Text, Body()]) -> int:
        return len(first.text) + len(second.text)

    return app


async def post(path: str, body: object = None, *, app: FastAPI | None = None, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app or echoing_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return await client.post(path, **({"json": body} | options))


@pytest.mark.parametrize(("size_bytes", "is_beside"), [(1, False), (2**20, True)])
async def test_large_bodies_are_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, *, size_bytes: int, is_beside: bool
) -> None:
    """Both parsed and validated: every other call would stand still for the seconds that takes."""
    parsers: list[int] = []

    def parse(body: bytes, **options: Any) -> Any:
        parsers.append(threading.get_ident())
        return parse_json(body, **options)

    monkeypatch.setattr(http_app, "parse_json", parse)
    answer = await post("/readers", {"text": "x" * size_bytes})
    assert [each != threading.get_ident() for each in [*parsers, answer.json()[0]]] == [is_beside] * 2


async def test_a_body_whose_client_left_counts_until_its_thread_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or clients that give up and send it again would fill the memory. One that waits for a thread is not parsed."""
    begun, may_end = list[bytes](), threading.Event()

    def parse(body: bytes, **_: Any) -> Any:
        begun.append(body)
        may_end.wait()
        return {"text": ""}

    monkeypatch.setattr(http_app, "parse_json", parse)
    app = echoing_app()
    body = {"text": "x" * 2**20}
    try:
        parsed = [asyncio.create_task(post("/length", body, app=app)) for _ in range(2)]
        await until(lambda: len(begun) == 2)
        waiting = asyncio.create_task(post("/length", body, app=app))
        await settled()
        for request in (*parsed, waiting):
            request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await promptly(waiting)
        await settled()
        assert [request.done() for request in parsed] == [False, False]
    finally:
        may_end.set()
    for request in parsed:
        with pytest.raises(asyncio.CancelledError):
            await promptly(request)
    assert len(begun) == 2


async def test_a_wrong_body_whose_client_left_is_no_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log would have a traceback for each."""
    begun, may_end, failures = threading.Event(), threading.Event(), list[Any]()

    def parse(_body: bytes, **_: Any) -> Any:
        begun.set()
        may_end.wait()
        raise InvalidRequestError("no JSON")

    monkeypatch.setattr(http_app, "parse_json", parse)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    try:
        request = asyncio.create_task(post("/length", {"text": "x" * 2**20}))
        await until(begun.is_set)
        request.cancel()
        await settled()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await promptly(request)
    del request
    gc.collect()
    assert failures == []


@_SIZES
async def test_bodies_of_all_forms_are_read(size_bytes: int) -> None:
    """A model, another type, and several models in one body."""
    body = {"text": "x" * size_bytes}
    assert (await post("/length", body)).json() == size_bytes
    assert (await post("/lengths", body)).json() == [size_bytes]
    assert (await post("/both", {"first": body, "second": body})).json() == 2 * size_bytes


@_SIZES
async def test_wrong_bodies_are_refused_by_field_whatever_their_size(size_bytes: int) -> None:
    """A wrong field, a key that comes twice, and what is not declared as JSON."""
    text = "x" * size_bytes
    answer = await post("/length", {"text": text, "texts": 1})
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "texts is unknown; leave it out")
    answer = await post("/lengths", {"text": text, "b": 1})
    assert (answer.status_code, answer.json()["error"]["message"][:5]) == (422, "b = 1")
    twice = f'{{"text": "{text}", "text": "b"}}'.encode()
    answer = await post("/length", content=twice)
    assert (answer.status_code, "'text' twice" in answer.json()["error"]["message"]) == (400, True)
    answer = await post("/length", content=twice, headers={"Content-Type": "text/plain"})
    assert (answer.status_code, "not declared as JSON" in answer.json()["error"]["message"]) == (422, True)
