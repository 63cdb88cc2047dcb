"""The scaffold of every gRPC server, over a real connection."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from penstock import errors
from penstock.rpc.channel import call, connect
from penstock.rpc.server import RpcServer, deadline_s, service_name
from penstock.runtime.security import Security
from penstock.telemetry import metrics
from penstock.v1 import router_pb2, router_pb2_grpc
from tests.support.deadlines import long_enough
from tests.support.waiting import HANG_S, promptly, until

NAME = "penstock.v1.RouterService"
REQUEST = router_pb2.ListReplicasRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


class Servicer(router_pb2_grpc.RouterServiceServicer):
    """Runs one function for each call."""

    def __init__(self, handle: Callable[[grpc.aio.ServicerContext], Awaitable[None]]) -> None:
        self._handle = handle

    async def ListReplicas(self, request, context) -> router_pb2.ListReplicasResponse:  # noqa: N802 - gRPC's name
        await self._handle(context)
        return router_pb2.ListReplicasResponse(published_version=7)


async def nothing(context: grpc.aio.ServicerContext) -> None:
    pass


@contextlib.asynccontextmanager
async def serving(handle=nothing) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = RpcServer(host="127.0.0.1", port=0)
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, Servicer(handle), NAME)
    await server.start()
    async with connect(server.address) as channel:
        yield server, channel
    await server.drain(0.0)


def list_replicas(channel: grpc.aio.Channel, **options):
    return router_pb2_grpc.RouterServiceStub(channel).ListReplicas(REQUEST, **({"timeout": HANG_S} | options))


async def health_of(channel: grpc.aio.Channel, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=HANG_S)).status


async def test_answers_and_names_its_address() -> None:
    """A call is answered on the port that was free; the name of a service comes from its descriptor."""
    async with serving() as (server, channel):
        assert (await list_replicas(channel)).published_version == 7
        assert not server.address.endswith(":0")
        assert service_name(router_pb2.DESCRIPTOR, "RouterService") == NAME


async def test_health_tells_of_the_server_and_of_each_service() -> None:
    """SERVING after start; what `set_serving` says afterwards; unknown names are NOT_FOUND."""
    async with serving() as (server, channel):
        assert [await health_of(channel, name) for name in ("", NAME)] == [SERVING, SERVING]
        await server.set_serving(False)
        assert await health_of(channel, NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "penstock.v1.NoSuchService")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    """A person with grpcurl finds the service, health and reflection."""
    async with serving() as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        [answer] = [each async for each in stub.ServerReflectionInfo(requests, timeout=HANG_S)]
        names = {service.name for service in answer.list_services_response.service}
        assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize(
    ("raised", "code", "received"),
    [
        (errors.InvalidRequestError("m"), grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (errors.CorruptMessageError("m"), grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (errors.DataError("m"), grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequestError),
        (errors.NotReadyError("m"), grpc.StatusCode.FAILED_PRECONDITION, errors.NotReadyError),
        (errors.UnavailableError("m"), grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (errors.OverloadedError("m"), grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (errors.DeadlineError("m"), grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (TimeoutError("m"), grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (ValueError("m"), grpc.StatusCode.INTERNAL, errors.PenstockError),
    ],
)
async def test_an_error_crosses_the_wire(raised: Exception, code: grpc.StatusCode, received: type) -> None:
    """What a handler raises comes back as the code and as the error that say the same, with its words."""

    async def handle(context: grpc.aio.ServicerContext) -> None:
        raise raised

    async with serving(handle) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_replicas(channel)
        assert caught.value.code() == code
        with pytest.raises(errors.PenstockError, match=r"the router: .*m$") as mapped:
            await call(list_replicas(channel), peer="the router")
        assert type(mapped.value) is received


@pytest.mark.parametrize("text", ["x" * 100_000, "é" * 50_000, "two\nlines"])
async def test_a_long_or_strange_message_keeps_its_code(text: str) -> None:
    """A message that does not fit into a gRPC status is cut; its code and its beginning arrive."""

    async def handle(context: grpc.aio.ServicerContext) -> None:
        raise errors.InvalidRequestError(text)

    async with serving(handle) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_replicas(channel)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(text[:500])


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    """A client hears UnavailableError with the peer's name, not that its time is up."""
    async with serving() as (server, _):
        address = server.address
    async with connect(address) as channel:
        with pytest.raises(errors.UnavailableError, match="the router"):
            await promptly(call(list_replicas(channel, timeout=600.0), peer="the router"))


async def test_a_client_finds_a_server_that_came_back() -> None:
    """The same channel works again after a restart on the same port."""
    async with serving() as (server, _):
        address = server.address
    async with connect(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await list_replicas(channel)
        again = RpcServer(host="127.0.0.1", port=int(address.split(":")[1]))
        again.add(router_pb2_grpc.add_RouterServiceServicer_to_server, Servicer(nothing), NAME)
        await again.start()
        assert (await list_replicas(channel, wait_for_ready=True)).published_version == 7
        await again.drain(0.0)


async def test_a_port_in_use_is_a_setup_error() -> None:
    """The message names setting, host, port and the remedy; the first server keeps its calls."""
    async with serving() as (server, channel):
        second = RpcServer(host="127.0.0.1", port=int(server.address.split(":")[1]), key="trainer.port")
        with pytest.raises(
            errors.SetupError, match=rf"trainer\.port: .*{server.address}.*in use.*choose another port, or 0"
        ):
            await second.start()
        assert (await list_replicas(channel)).published_version == 7


async def test_the_deadline_is_known_to_the_handler_and_cancels_it() -> None:
    """A handler sees what time is left, at most its own bound, and is cancelled when the time is up. Its default is for
    callers that set none."""
    seen: list[float] = []
    cancelled = asyncio.Event()

    async def handle(context: grpc.aio.ServicerContext) -> None:
        seen.extend([deadline_s(context, default=0.001), deadline_s(context, default=100.0, most=0.01)])
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(handle) as (_, channel):

        async def play(timeout_s: float) -> None:
            with pytest.raises(errors.DeadlineError):
                await call(list_replicas(channel, timeout=timeout_s), peer="the router")

        timeout_s = await long_enough(play, lambda: seen)
        await promptly(cancelled.wait())
    assert 0.0 < seen[-2] <= timeout_s + 0.01, "gRPC sends what is left in steps of 10 ms, rounded up"
    assert seen[-1] == 0.01


async def test_without_a_deadline_the_default_holds() -> None:
    """A caller that sets none gets the handler's."""
    seen: list[float] = []

    async def handle(context: grpc.aio.ServicerContext) -> None:
        seen.append(deadline_s(context, default=12.5))

    async with serving(handle) as (_, channel):
        await list_replicas(channel, timeout=None)
    assert seen == [12.5]


async def test_a_callers_cancellation_cancels_the_handler() -> None:
    """Nothing is computed for a caller that has gone."""
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(context: grpc.aio.ServicerContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(handle) as (_, channel):
        task = asyncio.create_task(call(list_replicas(channel), peer="the router"))
        await promptly(begun.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await promptly(cancelled.wait())


async def test_draining_lets_calls_finish_and_takes_no_new_ones() -> None:
    """The call that runs is answered; a new one is UNAVAILABLE; health says NOT_SERVING."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def handle(context: grpc.aio.ServicerContext) -> None:
        begun.set()
        await release.wait()

    async with serving(handle) as (server, channel):
        running = asyncio.ensure_future(list_replicas(channel))
        await promptly(begun.wait())
        draining = asyncio.create_task(server.drain(600.0))
        await promptly(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))  # it has heard of it
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await list_replicas(channel)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        release.set()
        assert (await running).published_version == 7
        await promptly(draining)


async def test_draining_cancels_what_outlives_the_grace() -> None:
    """The server ends after the grace, whatever its handlers do."""
    begun = asyncio.Event()

    async def handle(context: grpc.aio.ServicerContext) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with serving(handle) as (server, channel):
        running = asyncio.ensure_future(call(list_replicas(channel, timeout=600.0), peer="the router"))
        await promptly(begun.wait())
        await promptly(server.drain(0.3))
        with pytest.raises(errors.UnavailableError):
            await running


async def counted(*, code: str, method: str = f"/{NAME}/ListReplicas") -> float:
    """How many calls of `method` this process has ended with `code`."""
    head = f'penstock_rpc_calls_total{{code="{code}",method="{method}"}} '
    lines = (await metrics.page()).decode().splitlines()
    return sum(float(line.removeprefix(head)) for line in lines if line.startswith(head))


async def test_calls_are_counted_by_method_and_code() -> None:
    """Answered, failed and cancelled ones; while one is being answered it counts as running."""
    before = [await counted(code=code) for code in ("OK", "UNAVAILABLE", "CANCELLED")]
    outcomes = iter(("answer", "fail", "hang"))
    has_begun = asyncio.Event()

    async def handle(context: grpc.aio.ServicerContext) -> None:
        match next(outcomes):
            case "fail":
                raise errors.UnavailableError("m")
            case "hang":
                has_begun.set()
                await asyncio.Event().wait()

    async with serving(handle) as (_, channel):
        await list_replicas(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await list_replicas(channel)
        hanging = asyncio.ensure_future(list_replicas(channel))
        await has_begun.wait()
        running = f'penstock_rpc_calls_running{{method="/{NAME}/ListReplicas"}} 1.0'

        async def is_counted() -> bool:  # the call before is over for its caller sooner than for its server
            return running in (await metrics.page()).decode().splitlines()

        await until(is_counted)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)

    async def are_counted() -> bool:  # a cancelled handler ends after its caller and its server
        after = [await counted(code=code) for code in ("OK", "UNAVAILABLE", "CANCELLED")]
        return [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 1]

    await until(are_counted)


async def test_a_stranger_s_methods_are_no_labels() -> None:
    """Each label is a time series, and a caller without the token may name any method."""
    before = await counted(code="UNAUTHENTICATED", method="refused")
    server = RpcServer(host="127.0.0.1", port=0, security=Security(token="a" * 32))
    await server.start()
    async with connect(server.address, Security()) as channel:
        for name in ("/made.up.Service/One", "/made.up.Service/Two"):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(name, bytes, bytes)(b"", timeout=HANG_S)
    await server.drain(0.0)
    assert await counted(code="UNAUTHENTICATED", method="refused") == before + 2
    assert "made.up" not in (await metrics.page()).decode()


async def test_methods_that_are_not_served_are_no_labels() -> None:
    """A caller with access may name any method, too: those that nobody serves are neither counted nor timed."""
    made_up = [f"/made.up.Service/{number}" for number in range(3)] + [f"/{NAME}/MadeUp", "/made up"]
    async with serving() as (_, channel):
        await list_replicas(channel)
        for name in made_up:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(name, bytes, bytes)(b"", timeout=HANG_S)
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    methods = set(re.findall(r'penstock_rpc_\w+{.*method="([^"]*)"', (await metrics.page()).decode()))
    assert f"/{NAME}/ListReplicas" in methods
    assert not any("made" in method or "MadeUp" in method for method in methods)
