"""Who is let in to a gRPC server, over real connections."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2

from penstock.clients import RouterClient
from penstock.config import SecurityConfig
from penstock.errors import AccessError, ConfigError, UnavailableError
from penstock.rpc.channel import connect
from penstock.rpc.server import RpcServer
from penstock.runtime.security import CONTROL_REFUSAL, REFUSAL, Security
from penstock.v1 import router_pb2, router_pb2_grpc
from tests.support.certificates import security_of
from tests.support.sockets import options_of_accepted
from tests.support.strangers import SERVING, TOKEN, WRONG, ask, assert_rpc_is_closed
from tests.support.waiting import HANG_S

SERVICE = "penstock.v1.RouterService"
METHOD = f"/{SERVICE}/ListReplicas"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Servicer(router_pb2_grpc.RouterServiceServicer):
    """Counts who came in."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def ListReplicas(self, request, context) -> router_pb2.ListReplicasResponse:  # noqa: N802 - gRPC's name
        self.num_calls += 1
        return router_pb2.ListReplicasResponse(published_version=7)

    async def DrainReplica(self, request, context) -> router_pb2.RouterServiceDrainReplicaResponse:  # noqa: N802
        self.num_calls += 1
        return router_pb2.RouterServiceDrainReplicaResponse()


@contextlib.asynccontextmanager
async def serving(security: Security, *, host: str = "127.0.0.1") -> AsyncIterator[tuple[str, Servicer]]:
    server, servicer = RpcServer(host=host, port=0, security=security), Servicer()
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, servicer, SERVICE)
    await server.start()
    yield server.address.replace("0.0.0.0", "127.0.0.1"), servicer
    await server.drain(0.0)


async def version_at(address: str, security: Security) -> int:
    async with RouterClient(address, security=security) as client:
        return (await client.list_replicas()).published_version


async def silent_until(ended: asyncio.Event) -> AsyncIterator[bytes]:
    """Send no request."""
    await ended.wait()
    for request in ():
        yield request


@pytest.mark.parametrize("token", ["", WRONG, TOKEN[:-1], f"{TOKEN}0"])
async def test_a_caller_without_the_token_is_refused_and_learns_nothing(token: str) -> None:
    """Not even which methods there are; its client says what to do; the servicer never hears of it."""
    async with serving(Security(token=TOKEN)) as (address, servicer):
        await assert_rpc_is_closed(address, METHOD, security=Security(token=token))
        with pytest.raises(AccessError, match=rf"router at {address}: token missing or wrong; set PENSTOCK_TOKEN$"):
            await version_at(address, Security(token=token))
        assert servicer.num_calls == 0
        assert await version_at(address, Security(token=TOKEN)) == 7


async def test_a_refused_request_is_not_read() -> None:
    """What is no message, or a long one, is refused as every other; so is one that has not come yet."""
    ended = asyncio.Event()
    async with serving(Security(token=TOKEN)) as (address, _), connect(address, Security()) as channel:
        upload = channel.stream_unary(METHOD)  # type: ignore[call-arg]  # bytes need no serializers
        assert await upload(silent_until(ended), timeout=60.0).code() == grpc.StatusCode.UNAUTHENTICATED
        answers = {await ask(channel, METHOD, request) for request in (b"", b"\xff no message", bytes(50 * 2**20))}
        assert len(answers) == 1
        ended.set()


async def test_health_is_told_to_strangers_unread() -> None:
    """Whatever they send, and before they have sent it: a health check is no way to fill a server's memory."""
    ended = asyncio.Event()
    async with serving(Security(token=TOKEN)) as (address, _), connect(address, Security()) as channel:
        check, watch = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch"))
        checking = channel.stream_unary(check)  # type: ignore[call-arg]  # bytes need no serializers
        for request in (silent_until(ended), iter([bytes(50 * 2**20)])):
            answer = await checking(request, timeout=60.0)
            assert health_pb2.HealthCheckResponse.FromString(answer).status == SERVING
        watching = channel.stream_stream(watch)(silent_until(ended), timeout=60.0)  # type: ignore[call-arg]
        assert health_pb2.HealthCheckResponse.FromString(await watching.read()).status == SERVING
        watching.cancel()
        ended.set()


async def test_what_can_change_the_policy_needs_a_token_of_its_own() -> None:
    """The common token opens the rest; a stranger learns nothing of the difference."""
    both = Security(token=TOKEN, control_token="control")
    async with serving(both) as (address, servicer):
        control_methods = (f"/{SERVICE}/DrainReplica", "/penstock.v1.RolloutService/PrepareWeights")
        for security, words in ((Security(token=TOKEN), CONTROL_REFUSAL), (Security(), REFUSAL)):
            async with connect(address, security) as channel:
                answers = {(await ask(channel, method))[:2] for method in control_methods}
            assert answers == {(grpc.StatusCode.UNAUTHENTICATED, words)}
        async with connect(address, both) as channel:
            assert (await ask(channel, control_methods[0]))[0] == grpc.StatusCode.OK
        assert servicer.num_calls == 1
        assert await version_at(address, both) == 7
        with pytest.raises(AccessError):
            await version_at(address, Security(token="control"))


async def test_accepted_connections_send_at_once() -> None:
    """gRPC switches Nagle's algorithm off by itself."""
    async with serving(Security()) as (address, _):
        assert await version_at(address, Security()) == 7
        async with connect(address, Security()) as channel:
            await ask(channel, METHOD)
            assert set(options_of_accepted(int(address.split(":")[1]), socket.TCP_NODELAY)) == {1}


async def test_the_token_is_sent_with_every_kind_of_call_beside_its_own_metadata() -> None:
    """Unary and streaming; a call that was refused once is let in with the token."""
    seen = []

    async def one(request, context) -> bytes:
        seen.append(dict(context.invocation_metadata())["x-own"])
        return b"answer"

    async def many(request, context) -> AsyncIterator[bytes]:
        yield await one(request, context)

    methods = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(many if kind.endswith("_stream") else one) for kind in KINDS
    }
    handler = grpc.method_handlers_generic_handler("test.Kinds", methods)
    server = RpcServer(host="127.0.0.1", port=0, security=Security(token=TOKEN))
    server.add(lambda _, target: target.add_generic_rpc_handlers((handler,)), None, "test.Kinds")
    await server.start()

    async def call(channel: grpc.aio.Channel, kind: str) -> list[bytes]:
        request = iter([b"1"]) if kind.startswith("stream") else b"1"
        calling = getattr(channel, kind)(f"/test.Kinds/{kind}")(request, timeout=HANG_S, metadata=(("x-own", kind),))
        return [each async for each in calling] if kind.endswith("_stream") else [await calling]

    async with connect(server.address, Security(token=TOKEN)) as known, connect(server.address, Security()) as stranger:
        for kind in KINDS:
            assert await call(known, kind) == [b"answer"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(stranger, kind)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert seen == list(KINDS)
    await server.drain(0.0)


async def test_a_refusal_is_logged_without_what_was_shown() -> None:
    """With the caller's address, and neither the right token nor a wrong one."""
    with structlog.testing.capture_logs() as logs:
        async with serving(Security(token=TOKEN)) as (address, _):
            with pytest.raises(AccessError):
                await version_at(address, Security(token=WRONG))
            await version_at(address, Security(token=TOKEN))
    [refused] = [line for line in logs if line.get("outcome") == "UNAUTHENTICATED"]
    assert (refused["method"], refused["peer"][:14]) == (METHOD, "ipv4:127.0.0.1")
    assert TOKEN[:-1] not in repr(logs)


@pytest.mark.parametrize(
    ("host", "security", "warned"),
    [
        ("0.0.0.0", Security(), True),
        ("0.0.0.0", Security(token=TOKEN), False),
        ("127.0.0.1", Security(), False),
    ],
)
async def test_a_server_that_is_left_open_says_so(host: str, security: Security, warned: bool) -> None:
    """On other addresses than this machine's own, with what to do."""
    with structlog.testing.capture_logs() as logs:
        async with serving(security, host=host):
            pass
    warnings = [line["remedy"] for line in logs if line["event"] == "server.left_open"]
    assert warnings == (["set PENSTOCK_TOKEN, or keep the network private"] if warned else [])


async def test_tls_lets_in_who_knows_the_authority(
    certificates: SecurityConfig, other_certificates: SecurityConfig
) -> None:
    """And nobody else: plain text, another authority and no authority end before a call; each is told why."""
    both = certificates.model_copy(update={"tls_cert": None, "tls_key": None})
    async with serving(security_of(certificates, token=TOKEN)) as (address, servicer):
        with pytest.raises(UnavailableError, match="if it asks for TLS"):
            await version_at(address, Security(token=TOKEN))
        for stranger in (other_certificates, certificates.model_copy(update={"tls_ca": None})):
            with pytest.raises(UnavailableError, match=r"see security\.tls_ca"):
                await version_at(address, security_of(stranger, token=TOKEN))
        await assert_rpc_is_closed(address, METHOD, security=security_of(both))
        assert servicer.num_calls == 0
        assert await version_at(address, security_of(both, token=TOKEN)) == 7


async def test_a_certificate_must_name_the_host(certificates: SecurityConfig) -> None:
    """127.0.0.2 is this machine, too, but no name of the certificate."""
    security = security_of(certificates)
    async with serving(security, host="0.0.0.0") as (address, _):
        assert await version_at(address, security) == 7
        with pytest.raises(UnavailableError, match="does not name this host"):
            await version_at(address.replace("127.0.0.1", "127.0.0.2"), security)


async def test_one_name_may_stand_for_every_host(certificates: SecurityConfig) -> None:
    """As for containers, whose names no certificate can know; a certificate without it is none."""
    async with serving(security_of(certificates), host="0.0.0.0") as (address, _):
        elsewhere = address.replace("127.0.0.1", "127.0.0.2")
        named = certificates.model_copy(update={"tls_server_name": "penstock"})
        assert await version_at(elsewhere, security_of(named)) == 7
        with pytest.raises(UnavailableError, match="does not name this host"):
            await version_at(address, security_of(named.model_copy(update={"tls_server_name": "another"})))


async def test_a_token_is_not_shown_to_a_server_without_tls(certificates: SecurityConfig) -> None:
    """The client says what is wrong; the server hears nothing that it could read."""
    with structlog.testing.capture_logs() as logs:
        async with serving(Security(token=TOKEN)) as (address, _):
            with pytest.raises(UnavailableError, match="it speaks plain text: switch TLS on there"):
                await version_at(address, security_of(certificates, token=TOKEN))
    assert not [line for line in logs if line["event"] == "rpc.handled"]


async def test_mutual_tls_asks_for_the_callers_certificate(
    certificates: SecurityConfig, other_certificates: SecurityConfig
) -> None:
    """One of the same authority; without it there is not even health."""
    mutual = certificates.model_copy(update={"mutual": True})
    nameless = certificates.model_copy(update={"tls_cert": None, "tls_key": None})
    foreign = other_certificates.model_copy(update={"tls_ca": certificates.tls_ca})
    async with serving(security_of(mutual)) as (address, servicer):
        for stranger in (nameless, foreign):
            async with connect(address, security_of(stranger)) as channel:
                for method in (METHOD, "/grpc.health.v1.Health/Check"):
                    assert (await ask(channel, method))[0] == grpc.StatusCode.UNAVAILABLE
        assert servicer.num_calls == 0
        assert await version_at(address, security_of(mutual)) == 7


async def test_a_server_without_a_certificate_does_not_start(certificates: SecurityConfig) -> None:
    """Rather than in plain text, where the recipe asks for TLS."""
    security = security_of(certificates.model_copy(update={"tls_cert": None, "tls_key": None}))
    with pytest.raises(ConfigError, match=r"security\.tls_cert is not set; a server needs a certificate"):
        RpcServer(host="127.0.0.1", port=0, security=security)
