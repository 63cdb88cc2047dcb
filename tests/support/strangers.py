"""What a server tells a caller that has no business with it."""

from typing import Any

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.rpc.channel import connect
from penstock.runtime.security import REFUSAL, Security
from tests.support.waiting import promptly

TOKEN = "b2f5ff47436671b6e533d8dc3614845d"
WRONG = TOKEN[:-1] + "e"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVING = health_pb2.HealthCheckResponse.SERVING


async def ask(channel: grpc.aio.Channel, method: str, request: bytes = b"") -> tuple[Any, ...]:
    """Code, words and metadata of the answer to a call of `method`."""
    call = channel.unary_unary(method, None, None)(request, timeout=60.0)
    code, details = await call.code(), await call.details()
    headers = [*(await call.initial_metadata()), *(await call.trailing_metadata())]
    return code, details, *headers


async def assert_rpc_is_closed(address: str, method: str, *, security: Security | None = None) -> None:
    """A stranger hears the same of `method`, which is there, of one that is not, of a service that is not, and of
    reflection; but health is everybody's. `security` is what the stranger has."""
    package = method.rpartition("/")[0]
    async with connect(address, security or Security()) as channel:
        await promptly(channel.channel_ready())  # a server that has just been started may not listen yet
        answers = {
            await ask(channel, asked)
            for asked in (method, f"{package}/NoSuchMethod", "/no.such.Service/Do", REFLECTION)
        }
        assert answers == {(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)}
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60.0)
        assert health.status == SERVING


async def assert_http_is_closed(client: httpx.AsyncClient, path: str, **headers: str) -> None:
    """The same for HTTP; `client` has no token but for what `headers` say."""
    answers = set()
    for method in ("GET", "POST", "DELETE"):
        for asked in (path, "/no/such/page", "/openapi.json", "/metrics", "/docs"):
            answer = await client.request(method, asked, headers=headers)
            fixed = sorted((name, value) for name, value in answer.headers.items() if name != "date")
            answers.add((answer.status_code, answer.text, *fixed))
    body = f'{{"error":{{"code":"UNAUTHENTICATED","message":"{REFUSAL}"}}}}'
    expected = [
        ("content-length", str(len(body))),
        ("content-type", "application/json"),
        ("www-authenticate", "Bearer"),
    ]
    assert answers == {(401, body, *expected)}
