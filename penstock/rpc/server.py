"""Runs every gRPC server: access control, health, reflection, error mapping, one log line per call, metrics, drain.

Invariant: nothing is read from a call without the token. It is refused with the same answer whatever it asks for; only
health checks are open to everyone. While it drains, a server answers NOT_SERVING and refuses new calls; running calls
may finish within the grace period.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Counter, Gauge, Histogram

from penstock.errors import PenstockError, SetupError
from penstock.rpc.access import token_of
from penstock.rpc.channel import MAX_MESSAGE_BYTES
from penstock.rpc.status import code_of
from penstock.runtime.security import CONTROL_REFUSAL, REFUSAL, Security, shows
from penstock.telemetry import metrics

log = structlog.get_logger()

_CALLS = metrics.counter(
    "penstock_rpc_calls_total",
    "gRPC calls that ended, by method and status code; health checks are not counted.",
    ("method", "code"),
)
_CALL_SECONDS = metrics.histogram(
    "penstock_rpc_call_seconds", "Seconds from the start of a gRPC call to its end, streams included.", ("method",)
)
_CALLS_RUNNING = metrics.gauge("penstock_rpc_calls_running", "gRPC calls that are being answered.", ("method",))
_REFUSED = "refused"
"""Stands for the method of a call without the token: it may be any text."""

_MAX_STATUS_BYTES = 2000
_MAX_PENDING = 65536
_MAX_UNREQUESTED_S = 86_400

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server on the same port would silently share its calls
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # gRPC cancels calls that arrive faster than they are accepted; our servers have their own bounds.
    ("grpc.server.max_pending_requests", _MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    # It also cancels calls that are not accepted within 30 s, as on an overloaded machine. Only a call's deadline may
    # limit its time.
    ("grpc.server_max_unrequested_time_in_server", _MAX_UNREQUESTED_S),
)
"""HTTP/2 options of every server."""

_HEALTH = "/grpc.health.v1.Health/"
_QUIET_SERVICES = ("/grpc.health.", "/grpc.reflection.")


class RpcServer:
    """One gRPC server: add servicers, `start` it, and `drain` it at the end."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        key: str = "port",
        security: Security | None = None,
        max_connection_age_s: float | None = None,
    ) -> None:
        """Listen on `host`:`port`; port 0 takes any free one.

        Args:
            host: Address to listen on.
            port: Port to listen on.
            key: The setting that holds the port, for example router.port.
            security: The tokens and TLS required of callers; None: the tokens of the environment.
            max_connection_age_s: Ask callers to connect anew after this long, when their running calls have ended; they
                then see servers that were added under the same name. None: never.

        Raises:
            ConfigError: TLS is on without a certificate for servers.
        """
        self._security = security or Security.from_environment()
        if self._security.tls is not None:
            self._security.tls.require_certificate()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        boundary = _Boundary(self._security, self._health)
        age = (
            () if max_connection_age_s is None else (("grpc.max_connection_age_ms", int(max_connection_age_s * 1000)),)
        )
        self._server = grpc.aio.server(interceptors=[boundary], options=(*SERVER_OPTIONS, *age))
        self._host = host
        self._port = port
        self._key = key
        self._names: list[str] = []

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, full_name: str) -> None:
        """Serve `servicer`; `register` is the generated add_XServicer_to_server, `full_name` is package.Service."""
        register(servicer, self._server)
        self._names.append(full_name)

    async def start(self) -> int:
        """Start serving and return the port.

        Raises:
            SetupError: the port is in use or the host is not this machine's; the message names the setting.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        try:
            self._port = self._add_port(f"{self._host}:{self._port}")
        except RuntimeError:
            await self._server.stop(None)
            raise SetupError(
                f"{self._key}: cannot listen on {self._host}:{self._port}: the port is in use or the host is not this "
                "machine's; choose another port, or 0 for any that is free"
            ) from None
        await self._server.start()
        await self.set_serving(True)
        log.info("server.started", address=f"{self._host}:{self._port}", rpc_services=self._names)
        self._security.tell_if_open(self._host, self.address)
        return self._port

    def _add_port(self, address: str) -> int:
        tls = self._security.tls
        if tls is None:
            return self._server.add_insecure_port(address)
        assert tls.certificate is not None
        assert tls.key is not None
        authorities = tls.ca if tls.mutual else None
        credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], authorities, tls.mutual)
        return self._server.add_secure_port(address, credentials)

    async def set_serving(self, serving: bool) -> None:
        """Set the answer to health checks: whether this server takes work."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish for `grace_s` seconds, then cancel the rest."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        log.info("server.stopped", address=f"{self._host}:{self._port}")

    @property
    def address(self) -> str:
        """host:port, valid after `start`."""
        return f"{self._host}:{self._port}"


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    _Context = grpc.aio.ServicerContext[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic in the stubs only


class _Boundary(_Interceptor):
    """Admits callers, turns errors into codes, and logs one line per call. The only broad `except` of the servers."""

    def __init__(self, security: Security, health_servicer: Any) -> None:
        self._security = security
        self._health = health_servicer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        method = handler_call_details.method
        if (refusal := self._refusal(handler_call_details)) is not None:
            return self._unread_health(method) if method.startswith(_HEALTH) else _refusing(method, refusal)
        handler = cast(Any, await continuation(handler_call_details))
        if handler is None or method.startswith(_QUIET_SERVICES):
            return cast("_Handler", handler)
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def call(request: Any, context: _Context) -> Any:
            async with _accounted(method, context):
                response = inner(request, context)
                return await response if inspect.isawaitable(response) else response

        async def call_for_stream(request: Any, context: _Context) -> None:
            # One task for the handler and its writes, so that a cancelled call ends the handler at once.
            async with _accounted(method, context):
                responses = inner(request, context)
                if inspect.isawaitable(responses):
                    await responses  # it writes the responses itself
                    return
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await context.write(response)

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        wrap = cast("Callable[..., _Handler]", make)
        return wrap(
            call_for_stream if handler.response_streaming else call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _refusal(self, details: grpc.HandlerCallDetails) -> str | None:
        """Return the refusal of a caller with a wrong or missing token; None if it has access."""
        metadata = cast("Sequence[tuple[str, str | bytes]]", details.invocation_metadata)
        given = next((value for key, value in metadata if key == "authorization"), "")
        authorization = given if isinstance(given, bytes) else given.encode()
        needed = token_of(details.method, self._security)
        if shows(authorization, needed):
            return None
        # A caller without any token gets the same refusal whatever it asks for.
        return CONTROL_REFUSAL if self._security.admits(authorization) else REFUSAL

    def _unread_health(self, method: str) -> _Handler:
        """Return a handler that answers the whole server's health, without reading anything from the caller."""
        answer = self._health.Watch if method.endswith("/Watch") else self._health.Check

        async def tell(_: Any, context: _Context) -> None:
            if (response := await answer(health_pb2.HealthCheckRequest(), context)) is not None:
                await context.write(response)

        return _unread(tell, health_pb2.HealthCheckResponse.SerializeToString)


def _refusing(method: str, refusal: str) -> _Handler:
    async def refuse(_: Any, context: _Context) -> None:
        _CALLS.labels(_REFUSED, "UNAUTHENTICATED").inc()
        log.info("rpc.handled", method=method, outcome="UNAUTHENTICATED", peer=context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

    return _unread(refuse)


def _unread(handle: Callable[[Any, _Context], Awaitable[None]], serialize: Any = None) -> _Handler:
    """Return a handler for any kind of call that reads nothing: gRPC receives messages only when a handler asks."""
    make = cast(Any, grpc.stream_stream_rpc_method_handler)
    return cast("_Handler", make(handle, response_serializer=serialize))


@contextlib.asynccontextmanager
async def _accounted(method: str, context: _Context) -> AsyncIterator[None]:
    """End the call with the code of any error that leaves this context; count it, and log the outcome."""
    started, outcome = time.monotonic(), "OK"
    running, seconds = _measures(method)
    running.inc()
    try:
        yield
    except (PenstockError, TimeoutError) as error:
        outcome = code_of(error).name
        await context.abort(code_of(error), _cut(str(error) or "the deadline passed"))
    except grpc.aio.AbortError:
        outcome = "ABORTED"
        raise
    except Exception as error:
        if _is_of_ended_call(error):
            outcome = "CANCELLED"
            raise asyncio.CancelledError from error
        outcome = "INTERNAL"
        log.exception("rpc.crashed", method=method)
        await context.abort(grpc.StatusCode.INTERNAL, _cut(f"{type(error).__name__}: {error}"))
    except BaseException:
        outcome = "CANCELLED"
        raise
    finally:
        running.dec()
        _counter(method, outcome).inc()
        seconds.observe(time.monotonic() - started)
        level = log.debug if outcome == "OK" else log.info
        level("rpc.handled", method=method, outcome=outcome, elapsed_ms=_ms_since(started))


def _is_of_ended_call(error: Exception) -> bool:
    """Return whether the caller went while a response was being written: the write fails before gRPC cancels the
    handler. It comes in a group where a handler writes from several tasks."""
    _, others = ExceptionGroup("", [error]).split(grpc.aio.InternalError)
    return others is None


# Looking up children by their labels costs more than counting. Only methods that are served come here.
@functools.cache
def _measures(method: str) -> tuple[Gauge, Histogram]:
    return _CALLS_RUNNING.labels(method), _CALL_SECONDS.labels(method)


@functools.cache
def _counter(method: str, code: str) -> Counter:
    return _CALLS.labels(method, code)


def _cut(message: str) -> str:
    """Cut the message to fit a status: beyond 8 KiB, percent-encoded, the code itself is lost."""
    data = message.encode(errors="replace")
    return message if len(data) <= _MAX_STATUS_BYTES else data[:_MAX_STATUS_BYTES].decode(errors="ignore") + "..."


def _ms_since(started: float) -> float:
    return round((time.monotonic() - started) * 1000, 2)


def deadline_s(context: grpc.aio.ServicerContext[Any, Any], *, default: float, most: float = math.inf) -> float:
    """Return the seconds until the caller's deadline, or `default` if it sets none; at most `most`."""
    remaining = context.time_remaining()
    return min(most, default if remaining is None else max(0.0, remaining))


def service_name(descriptor: Any, name: str) -> str:
    """Return the full name of service `name` in a generated module's `DESCRIPTOR`."""
    return str(descriptor.services_by_name[name].full_name)
